"""What aot_export, aot_executable and aot_bundle declare."""

load("//rules:providers.bzl", "AotBundleInfo", "AotExecutableInfo", "AotExportInfo")
load(":analysis.bzl", "ActionsInfo", "analysis_test", "difference", "names", "only_action", "verdict")

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "TZ": "UTC",
}

def _command_problems(action, command):
    """How an action does not run the compiler as all must: flags, environment, and what the toolchain has as inputs."""
    flags = action.argv[1:4]
    environment = {name: value for name, value in action.env.items() if name != "PYTHONPATH"}
    inputs = [file.short_path for file in action.inputs.to_list()]
    return (
        difference("flags", flags, ["-B", "-s", "-S"]) +
        difference("command", action.argv[5], command) +
        difference("environment", environment, _ENVIRONMENT) +
        difference("PYTHONPATH", action.env["PYTHONPATH"].split("/")[-1], "site-packages:compiler") +
        difference("has a fingerprint", any([path.endswith("/fingerprint.txt") for path in inputs]), True)
    )

def _own_inputs(action):
    """Names of an action's inputs that are not the toolchain's."""
    return sorted([
        file.basename
        for file in action.inputs.to_list()
        if not file.short_path.startswith("compiler/stagec/") and file.basename not in ("site-packages", "fingerprint.txt")
    ])

def _option(action, name):
    return [action.argv[i + 1] for i in range(len(action.argv) - 1) if action.argv[i] == name]

def _export_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecExport")
    write = only_action(target, "FileWrite")
    bin_dir = ctx.bin_dir.path
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.f.exported"]) +
        difference("exported", target[AotExportInfo].exported.basename, "sample.f.exported") +
        difference("name", target[AotExportInfo].name, "sample.f") +
        difference("spec", write.content, '{"name":"f"}') +
        difference("inputs", _own_inputs(action), ["data.txt", "library.py", "model.py", "only_f.py", "sample.f.spec.json"]) +
        difference("outputs", names(action.outputs), ["sample.f.exported", "sample.f.exported.json"]) +
        difference("debug", names(target[OutputGroupInfo].debug), ["sample.f.debug.mlir"]) +
        difference("debug inputs", _own_inputs(only_action(target, "StagecDebug")), _own_inputs(action)) +
        difference(
            "import roots",
            _option(action, "--import-root"),
            [
                ".",
                bin_dir,
                "tests/rules/models",
                bin_dir + "/tests/rules/models",
                "tests/rules/library",
                bin_dir + "/tests/rules/library",
            ],
        ) +
        _command_problems(action, "export"),
    )

export_test = analysis_test(_export_test_impl)

def _own_dependencies_test_impl(ctx):
    action = only_action(ctx.attr.target, "StagecExport")
    return verdict(
        ctx,
        difference("inputs", _own_inputs(action), ["data.txt", "library.py", "model.py", "sample.g.spec.json"]),
    )

own_dependencies_test = analysis_test(_own_dependencies_test_impl)

def _executable_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecCompile")
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.f.cpu.batch8.json", "sample.f.cpu.batch8.xla"]) +
        difference("executable", target[AotExecutableInfo].executable.basename, "sample.f.cpu.batch8.xla") +
        difference("description", target[AotExecutableInfo].description.basename, "sample.f.cpu.batch8.json") +
        difference("inputs", _own_inputs(action), ["sample.f.cpu.batch8.spec.json", "sample.f.exported"]) +
        difference("outputs", names(action.outputs), ["sample.f.cpu.batch8.json", "sample.f.cpu.batch8.xla"]) +
        _command_problems(action, "compile"),
    )

executable_test = analysis_test(_executable_test_impl)

def _bundle_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecBundle")
    artifacts = [
        "sample.f.cpu.batch8.json",
        "sample.f.cpu.batch8.xla",
        "sample.f.exported",
        "sample.f.exported.json",
        "sample.f.spec.json",
        "sample.g.exported",
        "sample.g.exported.json",
        "sample.g.spec.json",
    ]
    info = target[AotBundleInfo]
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.aot"]) +
        difference("name and version", (info.name, info.version), ("sample", "1.2.3")) +
        difference("exports", [export.name for export in info.exports.to_list()], ["sample.f", "sample.g"]) +
        difference("executables", [one.name for one in info.executables.to_list()], ["sample.f.cpu.batch8"]) +
        difference("inputs", [name for name in _own_inputs(action) if ".params" not in name], artifacts) +
        difference("outputs", names(action.outputs), ["sample.aot"]) +
        _command_problems(action, "bundle"),
    )

bundle_test = analysis_test(_bundle_test_impl)

def _explanation_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    (inputs,) = [
        action.content
        for action in target[ActionsInfo].actions
        if action.mnemonic == "FileWrite" and names(action.outputs) == ["sample.explain.json"]
    ]
    told = json.decode(inputs)
    export = {"description": "sample.f.exported.json", "exported": "sample.f.exported", "spec": "sample.f.spec.json"}
    executable = {"export": "sample.f", "spec": "sample.f.cpu.batch8.spec.json"}
    wanted = export.values() + [executable["spec"], "sample.g.exported", "sample.explain.json"]
    compiled = [name for name in files if name.endswith(".xla") or name.endswith(".aot")]
    return verdict(
        ctx,
        difference("name and version", (told["name"], told["version"]), ("sample", "1.2.3")) +
        difference("exports", sorted(told["exports"]), ["sample.f", "sample.g"]) +
        difference("export", told["exports"]["sample.f"], export) +
        difference("executables", told["executables"], {"sample.f.cpu.batch8": executable}) +
        difference("missing files", [name for name in wanted if name not in files], []) +
        difference("what is compiled for it", compiled, []),
    )

explanation_test = analysis_test(_explanation_test_impl)

def _reproducibility_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    wanted = ["model.py", "library.py", "data.txt", "sample.f.exported", "sample.f.cpu.batch8.xla", "sample.g.spec.json"]
    return verdict(ctx, difference("missing files", [name for name in wanted if name not in files], []))

reproducibility_test = analysis_test(_reproducibility_test_impl)
