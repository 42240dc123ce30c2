"""What aot_export, aot_executable and aot_bundle declare."""

load("//rules:providers.bzl", "AotBundleInfo", "AotExecutableInfo", "AotExportInfo", "AotJaxCacheInfo", "AotProvenanceInfo", "PythonEnvironmentInfo")
load("//rules/private:jaxlibs.bzl", "compiled_executables")
load(":analysis.bzl", "ActionsInfo", "actions_of", "analysis_test", "difference", "names", "only_action", "verdict")

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "LC_ALL": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "TZ": "UTC",
}

_OTHER = "@stagec_planning//:environment"

JAXLIBS = [
    struct(release = "1.0.0", architecture = "x86_64", environment = None, plugins = {}, exec_properties = {}),
    struct(release = "2.0.0", architecture = "x86_64", environment = _OTHER, plugins = {}, exec_properties = {}),
    struct(release = "1.0.0", architecture = "aarch64", environment = _OTHER, plugins = {}, exec_properties = {}),
]

def _repositories(paths, name):
    """The repositories that a file or folder is from, without what Bazel puts in front of their names."""
    folders = [path.split("/") for path in paths]
    return [folder[-2].replace("~", "+").split("+")[-1] for folder in folders if folder[-1] == name]

def _folders(line):
    """The folders of packages in a line of a launcher: of each $(packages IN_RUNFILES IN_EXECUTION_ROOT) the first word."""
    words = line.replace("'", "").split("$(packages ")[1:]
    return [word.split(" ")[0] for word in words]

def _plugins(target):
    """Platform and folder of each `--plugin PLATFORM="$(packages ...)"` of a program, as two lists."""
    (command,) = [
        line
        for action in target[ActionsInfo].actions
        for line in (action.content or "").splitlines()
        if line.startswith("exec ")
    ]
    words = command.split("--plugin ")[1:]
    return [word.split("=")[0] for word in words], [folder for word in words for folder in _folders(word)]

_TRACING = ["action %s" % name for name in ["export", "locations", "jaxpr", "golden", "jax-key"]]

def _command_problems(action, command, environments = ["stagec_python"], extension = ""):
    """How an action does not run the compiler as all must: flags, variables, which environments and extensions are inputs.

    An edit in an extension builds nothing again that does not have it.
    """
    own = ["PYTHONPATH", "STAGEC_PYTHON_ABI", "STAGEC_PYTHON_VERSION"]
    environment = {name: value for name, value in action.env.items() if name not in own}
    inputs = [file.short_path for file in action.inputs.to_list()]
    return (
        difference("shell", [action.argv[0], action.argv[1].split("/")[-1]], ["/bin/sh", "start.sh"]) +
        difference("interpreter", action.argv[2].startswith("/"), True) +
        difference("flags", action.argv[3:6], ["-B", "-s", "-S"]) +
        difference("command", " ".join(action.argv[7:]).startswith(command + " "), True) +
        difference("ABI", action.env["STAGEC_PYTHON_ABI"].split("-")[0], "cpython") +
        difference("depends on Python's release", "STAGEC_PYTHON_VERSION" in action.env, command in _TRACING) +
        difference("environment", environment, _ENVIRONMENT) +
        difference("PYTHONPATH", action.env["PYTHONPATH"].split("/")[-1], extension or "site-packages:compiler") +
        difference("extensions", _extensions(inputs), [extension] if extension else []) +
        difference("packages", _repositories(action.env["PYTHONPATH"].split(":"), "site-packages"), environments) +
        difference("inputs", sorted(_repositories(inputs, "site-packages")), sorted(environments)) +
        difference("fingerprints", sorted(_repositories(inputs, "fingerprint.txt")), sorted(environments))
    )

def _extensions(paths):
    """The extensions that files are of, by their names."""
    return {path.split("/")[2]: None for path in paths if path.startswith("compiler/extensions/")}.keys()

def _launcher_problems(target, found, there):
    """How a program does not find the packages of the environments `found`, or has not all of `there` beside it."""
    (line,) = [
        line
        for action in target[ActionsInfo].actions
        for line in (action.content or "").splitlines()
        if line.startswith("export PYTHONNOUSERSITE")
    ]
    files = [file.short_path for file in target[DefaultInfo].default_runfiles.files.to_list()]
    return (
        difference("packages", _repositories(_folders(line), "site-packages"), found) +
        difference("runfiles", sorted(_repositories(files, "site-packages")), sorted(there)) +
        difference("fingerprints", sorted(_repositories(files, "fingerprint.txt")), sorted(there))
    )

def _own_inputs(action):
    """Names of an action's inputs that are neither the toolchain's nor its arguments."""
    return sorted([
        file.basename
        for file in action.inputs.to_list()
        if not file.short_path.startswith(("compiler/stagec/", "compiler/extensions/")) and
           file.basename not in ("site-packages", "fingerprint.txt", "packages.json", "start.sh") and
           not file.basename.endswith(".params")
    ])

def _option(action, name):
    values = [action.argv[i + 1] for i in range(len(action.argv) - 1) if action.argv[i] == name]
    return values + [word[len(name) + 1:] for word in action.argv if word.startswith(name + "=")]

def _export_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecExport")
    write = only_action(target, "FileWrite")
    bin_dir = ctx.bin_dir.path
    outputs = ["sample.f.exported", "sample.f.exported.json", "sample.f.exported.unread", "sample.f.profile.json"]
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.f.exported"]) +
        difference("exported", target[AotExportInfo].exported.basename, "sample.f.exported") +
        difference("name", target[AotExportInfo].name, "sample.f") +
        difference("spec", write.content, '{"bind":{},"entry":"model:f","golden":null,"name":"f"}') +
        difference("inputs", _own_inputs(action), ["data.txt", "library.py", "model.py", "only_f.py", "sample.f.spec.json"]) +
        difference("outputs", names(action.outputs), outputs) +
        difference("profile", names(target[OutputGroupInfo].profile), ["sample.f.profile.json"]) +
        difference("debug", names(target[OutputGroupInfo].debug), ["sample.f.debug.mlir"]) +
        difference("debug inputs", _own_inputs(only_action(target, "StagecDebug")), _own_inputs(action)) +
        difference("jaxpr", names(target[OutputGroupInfo].jaxpr), ["sample.f.jaxpr.txt"]) +
        difference("jaxpr inputs", _own_inputs(only_action(target, "StagecJaxpr")), _own_inputs(action)) +
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
        _command_problems(action, "action export"),
    )

export_test = analysis_test(_export_test_impl)

# What the sources of g say that it looks for. f has function_deps.
_LOOKED = ["names.txt", "sample.g.json"]

def _own_dependencies_test_impl(ctx):
    action = only_action(ctx.attr.target, "StagecExport")
    return verdict(
        ctx,
        difference(
            "inputs",
            _own_inputs(action),
            sorted(["data.txt", "library.py", "model.py", "sample.g.spec.json"] + _LOOKED),
        ),
    )

own_dependencies_test = analysis_test(_own_dependencies_test_impl)

_ROW = "stagec_known_builds.json"

def _examination_problems(ctx, rows):
    """How an action does not examine a library, with the rows of others as inputs; or has not one row as its output."""
    action = only_action(ctx.attr.target, "StagecExamine")
    inputs = [file.basename for file in action.inputs.to_list()]
    path = action.env["PYTHONPATH"].split(":")
    return (
        difference("files", names(ctx.attr.target.files), [_ROW]) +
        difference("outputs", names(action.outputs), [_ROW]) +
        difference("command", action.argv[7:9], ["action", "examine"]) +
        difference("rows", [name for name in inputs if name == _ROW], [_ROW] * rows) +
        difference("folders of rows", len([folder for folder in path if "unknown_cpu" in folder]), rows) +
        difference("other inputs", [name for name in ["cpu.toml", "data.txt", "program.py", "probe.py"] if name not in inputs], [])
    )

def _examined_jaxlib_test_impl(ctx):
    return verdict(ctx, _examination_problems(ctx, 0))

def _examined_plugin_test_impl(ctx):
    return verdict(ctx, _examination_problems(ctx, 1))

def _examined_environment_test_impl(ctx):
    environment = ctx.attr.target[PythonEnvironmentInfo]
    return verdict(
        ctx,
        difference("rows", [row.basename for row in environment.examined], [_ROW]) +
        difference("what a worker's key has", names(ctx.attr.target.files), ["data.txt"]),
    )

def _examined_by_nobody_here_test_impl(ctx):
    action = only_action(ctx.attr.target, "StagecCompile")
    return verdict(ctx, difference("rows", [file.basename for file in action.inputs.to_list() if file.basename == _ROW], []))

def _examined_here_test_impl(ctx):
    action = only_action(ctx.attr.target, "StagecCompile")
    return verdict(
        ctx,
        difference("rows", [file.basename for file in action.inputs.to_list() if file.basename == _ROW], [_ROW]) +
        difference("folders of rows", len([folder for folder in action.env["PYTHONPATH"].split(":") if "unknown_cpu" in folder]), 1),
    )

examined_jaxlib_test = analysis_test(_examined_jaxlib_test_impl)
examined_plugin_test = analysis_test(_examined_plugin_test_impl)
examined_environment_test = analysis_test(_examined_environment_test_impl)
examined_by_nobody_here_test = analysis_test(_examined_by_nobody_here_test_impl)
examined_here_test = analysis_test(_examined_here_test_impl)

def _text_problems(target, group, mnemonic, file):
    """How an output group is not one file, made by an action that has what compiling has as its inputs."""
    action = only_action(target, mnemonic)
    return (
        difference(group, names(target[OutputGroupInfo][group]), [file]) +
        difference("who writes it", [name for name in names(action.outputs) if name == file], [file]) +
        difference("inputs of " + mnemonic, _own_inputs(action), ["sample.f.cpu.batch8.spec.json", "sample.f.exported"])
    )

def _executable_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecCompile")
    files = ["sample.f.cpu.batch8.json", "sample.f.cpu.batch8.stablehlo.mlirbc", "sample.f.cpu.batch8.xla"]
    outputs = sorted(files + ["sample.f.cpu.batch8.inventory.json", "sample.f.cpu.batch8.profile.json"])
    timeline = only_action(target, "StagecTimeline")
    return verdict(
        ctx,
        difference("files", names(target.files), files) +
        difference("executable", target[AotExecutableInfo].executable.basename, "sample.f.cpu.batch8.xla") +
        difference("description", target[AotExecutableInfo].description.basename, "sample.f.cpu.batch8.json") +
        difference("inputs", _own_inputs(action), ["sample.f.cpu.batch8.spec.json", "sample.f.exported"]) +
        difference("outputs", names(action.outputs), outputs) +
        difference("profile", names(target[OutputGroupInfo].profile), ["sample.f.cpu.batch8.profile.json"]) +
        difference("inventory", names(target[OutputGroupInfo].inventory), ["sample.f.cpu.batch8.inventory.json"]) +
        difference("label", [word for word in action.argv if "--label" in word], ["--label=//tests/rules:sample.f.cpu.batch8"]) +
        _text_problems(target, "stablehlo", "StagecLower", "sample.f.cpu.batch8.stablehlo.mlir") +
        _text_problems(target, "hlo_before", "StagecLower", "sample.f.cpu.batch8.hlo_before.txt") +
        _text_problems(target, "hlo_after", "StagecOptimize", "sample.f.cpu.batch8.hlo_after.txt") +
        _text_problems(target, "hlo_proto", "StagecOptimize", "sample.f.cpu.batch8.hlo_after.pb") +
        difference("timeline", names(target[OutputGroupInfo].timeline), ["sample.f.cpu.batch8.timeline.json"]) +
        difference("inputs of the timeline", _own_inputs(timeline), [
            "sample.f.cpu.batch8.hlo_after.txt",
            "sample.f.cpu.batch8.json",
            "sample.f.cpu.batch8.spec.json",
        ]) +
        _command_problems(timeline, "action timeline", extension = "insight") +
        _command_problems(action, "action compile"),
    )

executable_test = analysis_test(_executable_test_impl)

def _plugin_executable_test_impl(ctx):
    target = ctx.attr.target
    info = target[AotExecutableInfo]
    action = only_action(target, "StagecCompileTpu")
    return verdict(
        ctx,
        difference("platform", info.platform, "tpu") +
        difference("plugin", _repositories([info.plugin.site_packages.short_path], "site-packages"), ["stagec_planning"]) +
        difference("inputs", _own_inputs(action), ["sample.f.exported", "sample.f.v5e.spec.json"]) +
        _command_problems(action, "action compile", _WITH_PLUGIN) +
        _command_problems(only_action(target, "StagecOptimize"), "action optimize", _WITH_PLUGIN) +
        _command_problems(only_action(target, "StagecLower"), "action lower"),
    )

plugin_executable_test = analysis_test(_plugin_executable_test_impl)

_WITH_PLUGIN = ["stagec_python", "stagec_planning"]

def _plugin_explanation_test_impl(ctx):
    target = ctx.attr.target
    platforms, folders = _plugins(target)
    return verdict(
        ctx,
        # What is traced does not see the plugin.
        _launcher_problems(target, ["stagec_python"], _WITH_PLUGIN) +
        difference("platforms", platforms, ["tpu"]) +
        difference("plugins", _repositories(folders, "site-packages"), ["stagec_planning"]),
    )

plugin_explanation_test = analysis_test(_plugin_explanation_test_impl)

_KERNELS = [
    "kernels.f.exported",
    "kernels.f.exported.json",
    "kernels.f.exported.unread",
    "kernels.f.lowered",
    "kernels.f.profile.json",
]

def _kernels_export_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecExport")
    return verdict(
        ctx,
        difference("files", names(target.files), ["kernels.f.exported"]) +
        difference("lowered", target[AotExportInfo].lowered.basename, "kernels.f.lowered") +
        difference("outputs", names(action.outputs), _KERNELS) +
        _command_problems(action, "action export", _WITH_PLUGIN) +
        _command_problems(only_action(target, "StagecJaxpr"), "action jaxpr", _WITH_PLUGIN) +
        _command_problems(only_action(target, "StagecDebug"), "action locations", _WITH_PLUGIN),
    )

kernels_export_test = analysis_test(_kernels_export_test_impl)

def _kernels_executable_test_impl(ctx):
    target = ctx.attr.target
    problems = []
    for mnemonic in (ctx.attr.mnemonic, "StagecLower", "StagecOptimize"):
        action = only_action(target, mnemonic)
        wanted = sorted(["kernels.f.exported", target.label.name + ".spec.json"] + ctx.attr.lowered)
        problems += difference("inputs of " + mnemonic, _own_inputs(action), wanted)
        given = [path.split("/")[-1] for path in _option(action, "--lowered")]
        problems += difference("option of " + mnemonic, given, ctx.attr.lowered)
    return verdict(ctx, problems)

kernels_executable_test = analysis_test(_kernels_executable_test_impl, {
    "lowered": attr.string_list(doc = "What JAX lowered for devices, as far as it is compiled."),
    "mnemonic": attr.string(doc = "The mnemonic of the action that compiles."),
})

def _kernels_programs_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]

    # Bazel 7 says what is in the list of runfiles, too.
    texts = [action.content or "" for action in target[ActionsInfo].actions if action.mnemonic == "FileWrite"]
    plugin = [text for text in texts if "--plugin" in text and ctx.attr.platform + "=" in text]
    return verdict(
        ctx,
        difference("missing files", [name for name in ("kernels.f.lowered",) if name not in files], []) +
        difference("contents that name the file", len([text for text in texts if "kernels.f.lowered" in text]), 1) +
        difference("contents that name the plugin", len(plugin), 1) +
        _launcher_problems(target, ["stagec_python"], _WITH_PLUGIN),
    )

kernels_programs_test = analysis_test(_kernels_programs_test_impl, {
    "platform": attr.string(doc = "The platform of the plugin."),
})

def _autotuning_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    wanted = ["tuned.f.h200.spec.json", "sample.f.exported", "tuned.autotune.json"]
    (script,) = [
        action.content
        for action in target[ActionsInfo].actions
        if names(action.outputs) == [target.label.name]
    ]
    return verdict(
        ctx,
        _launcher_problems(target, _WITH_PLUGIN, _WITH_PLUGIN) +
        difference("missing files", [name for name in wanted if name not in files], []) +
        difference("what is compiled for it", [name for name in files if name.endswith(".xla")], []) +
        difference("folder", script.count(' autotune --root "${BUILD_WORKSPACE_DIRECTORY:-.}" "$@" "$workspace"/'), 1),
    )

autotuning_test = analysis_test(_autotuning_test_impl)

def _plugin_reproducibility_test_impl(ctx):
    target = ctx.attr.target
    platforms, folders = _plugins(target)
    return verdict(
        ctx,
        # What is traced again does not see the plugin.
        _launcher_problems(target, ["stagec_python"], _WITH_PLUGIN) +
        difference("platforms", platforms, ["tpu"]) +
        difference("plugins", _repositories(folders, "site-packages"), ["stagec_planning"]),
    )

plugin_reproducibility_test = analysis_test(_plugin_reproducibility_test_impl)

def _plugins_test_impl(ctx):
    wanted = {
        "cpu": "None",
        "cuda": "stagec_cuda//:environment",
        "rocm": "stagec_rocm//:environment",
        "tpu": "stagec_tpu//:environment",
    }
    return verdict(
        ctx,
        difference("platforms", sorted(ctx.attr.plugins), sorted(["platforms.f." + platform for platform in wanted])) +
        [
            "%s: got %s" % (name, plugin)
            for name, plugin in ctx.attr.plugins.items()
            if not plugin.endswith(wanted[name.split(".")[-1]])
        ] +
        difference("function without kernels", ctx.attr.traced["platforms.f"], "None") +
        ([] if ctx.attr.traced["platforms.k"].endswith(wanted["cuda"]) else ["kernels: got %r" % ctx.attr.traced]) +
        [
            "%s: got %s" % (name, plugin)
            for name, plugin in ctx.attr.run.items()
            if not plugin.endswith(wanted[name.split("_")[1] if name.count("_") > 1 else "cpu"])
        ] +
        difference("executables whose kernels are timed", ctx.attr.tuned, [":platforms.f.tuned"]) +
        difference("programs beside executables", ctx.attr.optimized, {"cuda": "", "rocm": "", "tpu": ":platforms.f.tpu"}),
    )

plugins_test = rule(
    implementation = _plugins_test_impl,
    doc = "Passes if executables for each platform name its plugin.",
    test = True,
    attrs = {
        "optimized": attr.string_dict(doc = "Platforms whose decided programs are tested, and the executables that tests name."),
        "plugins": attr.string_dict(doc = "Names of executables and the plugins that they name."),
        "run": attr.string_dict(doc = "Names of tests of golden results and the plugins that they name."),
        "traced": attr.string_dict(doc = "Names of exports and the plugins that they name."),
        "tuned": attr.string_list(doc = "The executables of the program that times kernels."),
    },
)

def _bundle_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecBundle")
    artifacts = [
        "g.safetensors",
        "sample.f.cpu.batch8.json",
        "sample.f.cpu.batch8.stablehlo.mlirbc",
        "sample.f.cpu.batch8.xla",
        "sample.f.exported",
        "sample.f.exported.json",
        "sample.f.spec.json",
        "sample.g.exported",
        "sample.g.exported.json",
        "sample.g.golden.safetensors",
        "sample.g.spec.json",
    ]
    profiles = [name + ".profile.json" for name in ["sample.f.cpu.batch8", "sample.f", "sample.g", "sample"]]
    info = target[AotBundleInfo]
    groups = target[OutputGroupInfo]
    executable = "sample.f.cpu.batch8."
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.aot"]) +
        difference("name and version", (info.name, info.version), ("sample", "1.2.3")) +
        difference("exports", [export.name for export in info.exports.to_list()], ["sample.f", "sample.g"]) +
        difference("executables", [one.name for one in info.executables.to_list()], ["sample.f.cpu.batch8"]) +
        difference("inputs", _own_inputs(action), artifacts) +
        difference("outputs", names(action.outputs), ["sample.aot", "sample.profile.json"]) +
        difference("profiles", names(groups.profile), profiles) +
        difference("jaxpr", names(groups.jaxpr), ["sample.f.jaxpr.txt"]) +  # sample.g is a StableHLO module
        difference("debug", names(groups.debug), ["sample.f.debug.mlir", "sample.g.debug.mlir"]) +
        difference("stablehlo", names(groups.stablehlo), [executable + "stablehlo.mlir"]) +
        difference("hlo_before", names(groups.hlo_before), [executable + "hlo_before.txt"]) +
        difference("hlo_after", names(groups.hlo_after), [executable + "hlo_after.txt"]) +
        difference("hlo_proto", names(groups.hlo_proto), [executable + "hlo_after.pb"]) +
        difference("inventory", names(groups.inventory), [executable + "inventory.json"]) +
        difference("timeline", names(groups.timeline), [executable + "timeline.json"]) +
        _command_problems(action, "action bundle"),
    )

bundle_test = analysis_test(_bundle_test_impl)

def _report_test_impl(ctx):
    target = ctx.attr.target
    pages = [action for action in target[ActionsInfo].actions if action.mnemonic == "StagecReport"]
    (page, timed) = pages
    files = ["sample.aot", "sample.f.cpu.batch8.inventory.json", "sample.intoto.json"]
    drawn = ["echarts.LICENSE", "echarts.NOTICE", "echarts.min.js", "page.css", "page.js"]
    profiles = ["sample.f.cpu.batch8.profile.json", "sample.f.profile.json", "sample.g.profile.json"]
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.report.html"]) +
        difference("timed", names(target[OutputGroupInfo].timed), ["sample.report.timed.html"]) +
        difference("inputs", _own_inputs(page), files) +  # nothing that differs every time
        difference("inputs with times", _own_inputs(timed), sorted(files + profiles)) +
        difference("what is in it", sorted([file.basename for file in page.inputs.to_list() if "/page/" in file.path]), drawn) +
        _command_problems(page, "report", extension = "insight"),
    )

report_test = analysis_test(_report_test_impl)

def _gates_test_impl(ctx):
    content = "\n".join([action.content or "" for action in ctx.attr.target[ActionsInfo].actions])
    return verdict(
        ctx,
        ["%r is not in the program" % word for word in ctx.attr.words if word not in content] +
        _launcher_problems(ctx.attr.target, ["stagec_python"], ["stagec_python"]),
    )

gates_test = analysis_test(
    _gates_test_impl,
    attrs = {"words": attr.string_list(doc = "What the program must have.")},
)

def _golden_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecGolden")
    artifacts = ["sample.g.exported", "sample.g.exported.json", "sample.g.spec.json"]
    sources = ["data.txt", "g.npz", "g.safetensors", "library.py", "model.py"] + _LOOKED
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.g.golden.safetensors"]) +
        difference("inputs", _own_inputs(action), sorted(artifacts + sources)) +
        difference("given", _option(action, "--inputs"), ["tests/rules/g.npz"]) +
        difference("weights", _option(action, "--weights"), ["g.safetensors=tests/rules/g.safetensors"]) +
        difference("outputs", names(action.outputs), ["sample.g.golden.safetensors", "sample.g.golden.safetensors.unread"]) +
        _command_problems(action, "action golden"),
    )

golden_test = analysis_test(_golden_test_impl)

def _provenance_test_impl(ctx):
    target = ctx.attr.target
    action = only_action(target, "StagecProvenance")
    sources = ["data.txt", "g.npz", "g.safetensors", "library.py", "model.py", "only_f.py"]
    specs = ["sample.f.cpu.batch8.spec.json", "sample.f.spec.json", "sample.g.spec.json"]
    info = target[AotProvenanceInfo]
    inputs = [file.short_path for file in action.inputs.to_list()]
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.intoto.json", "sample.sbom.json"]) +
        difference("statement", info.statement.basename, "sample.intoto.json") +
        difference("sbom", info.sbom.basename, "sample.sbom.json") +
        difference("bundle", info.bundle.basename, "sample.aot") +
        difference(
            "inputs",
            [name for name in _own_inputs(action) if ".params" not in name],
            sorted(sources + specs + ["sample.aot", "sample.toml"]),
        ) +
        difference(
            "packages",
            sorted(_repositories(inputs, "packages.json")),
            ["stagec_planning", "stagec_python"],
        ) +
        _command_problems(action, "action provenance"),
    )

provenance_test = analysis_test(_provenance_test_impl)

def _jax_cache_test_impl(ctx):
    target = ctx.attr.target
    key = only_action(target, "StagecJaxKey")
    compiling = only_action(target, "StagecJaxCompile")
    written = only_action(target, "StagecJaxCache")
    sources = ["data.txt", "library.py", "model.py", "only_f.py"]
    specs = ["sample.f.cpu.batch8.spec.json", "sample.f.spec.json"]
    entry = ["sample.f.cpu.batch8.json", "sample.f.cpu.batch8.xla"]
    return verdict(
        ctx,
        difference("files", names(target.files), ["sample.jax_cache"]) +
        difference("layer", target[AotJaxCacheInfo].layer.basename, "sample.jax_cache.tar") +
        difference("inputs of the key", _own_inputs(key), sorted(sources + specs)) +
        difference("key", names(key.outputs), ["sample.f.cpu.batch8.key", "sample.f.cpu.batch8.key.unread"]) +
        difference("inputs of compiling", _own_inputs(compiling), ["sample.f.cpu.batch8.key", specs[0]]) +
        difference("ways of calling", _option(key, "--committed"), ["none", "0,2"]) +
        difference("machines", _option(compiling, "--machine"), ["0123456789abcdef"]) +
        difference("entry", sorted(names(compiling.outputs)), entry) +
        difference("inputs of the folder", _own_inputs(written), entry) +
        _command_problems(key, "action jax-key") +
        _command_problems(compiling, "action jax-compile") +
        _command_problems(written, "action jax-cache"),
    )

jax_cache_test = analysis_test(_jax_cache_test_impl)

def _serving_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    return verdict(
        ctx,
        difference("missing files", [n for n in ("sample.aot",) if n not in files], []) +
        _launcher_problems(target, ["stagec_python", "stagec_serving"], ["stagec_python", "stagec_serving"]),
    )

serving_test = analysis_test(_serving_test_impl)

def _signing_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    made = [action.mnemonic for action in target[ActionsInfo].actions if action.mnemonic.startswith("Stagec")]
    return verdict(
        ctx,
        difference("missing files", [n for n in ("sample.aot", "sample.intoto.json") if n not in files], []) +
        difference("actions that could see a key", made, []) +
        _launcher_problems(target, ["stagec_python", "stagec_signing"], ["stagec_python", "stagec_signing"]),
    )

signing_test = analysis_test(_signing_test_impl)

def _addition_test_impl(ctx):
    action = only_action(ctx.attr.target, "StagecAddJaxlib")
    folder = action.outputs.to_list()[0].dirname + "/added.weights"
    weights = [file.path for file in action.inputs.to_list() if file.extension == "safetensors"]
    return verdict(
        ctx,
        difference("folder", _option(action, "--weights"), [folder]) +
        difference("weights", weights, [folder + "/weights/large.safetensors"]),
    )

addition_test = analysis_test(_addition_test_impl)

def _explanation_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    (inputs,) = [
        action.content
        for action in target[ActionsInfo].actions
        if action.mnemonic == "FileWrite" and names(action.outputs) == ["sample.explain.json"]
    ]
    told = json.decode(inputs)
    export = {
        "description": "sample.f.exported.json",
        "exported": "sample.f.exported",
        "lowered": "",
        "spec": "sample.f.spec.json",
    }
    executable = {"export": "sample.f", "spec": "sample.f.cpu.batch8.spec.json"}
    wanted = [name for name in export.values() if name] + [executable["spec"], "sample.g.exported", "sample.explain.json"]
    compiled = [name for name in files if name.endswith(".xla") or name.endswith(".aot")]
    return verdict(
        ctx,
        difference("name and version", (told["name"], told["version"]), ("sample", "1.2.3")) +
        difference("exports", sorted(told["exports"]), ["sample.f", "sample.g"]) +
        difference("export", told["exports"]["sample.f"], export) +
        difference("executables", told["executables"], {"sample.f.cpu.batch8": executable}) +
        difference("missing files", [name for name in wanted if name not in files], []) +
        _launcher_problems(target, ["stagec_python"], ["stagec_python"]) +
        difference("what is compiled for it", compiled, []),
    )

explanation_test = analysis_test(_explanation_test_impl)

def _reproducibility_test_impl(ctx):
    target = ctx.attr.target
    files = [file.basename for file in target[DefaultInfo].default_runfiles.files.to_list()]
    wanted = ["model.py", "library.py", "data.txt", "sample.f.exported", "sample.f.cpu.batch8.xla", "sample.g.spec.json"]
    return verdict(
        ctx,
        difference("missing files", [name for name in wanted if name not in files], []) +
        _launcher_problems(target, ["stagec_python"], ["stagec_python"]),
    )

reproducibility_test = analysis_test(_reproducibility_test_impl)

def _jaxlib_test_impl(ctx):
    other = ["stagec_planning"]
    compiled = ctx.attr.target
    stem = "fleet.f.cpu.jaxlib-2.0.0"
    action = only_action(compiled, "StagecCompile")
    told = only_action(ctx.attr.provenance, "StagecProvenance")
    inputs = [file.short_path for file in told.inputs.to_list()]
    (arguments,) = [
        action.content
        for action in ctx.attr.reproducibility[ActionsInfo].actions
        if names(action.outputs) == [ctx.attr.reproducibility.label.name + ".arguments"]
    ]
    executables = ["fleet.f.cpu", stem, "fleet.f.own", "fleet.f.own.jaxlib-2.0.0"]
    return verdict(
        ctx,
        difference("files", names(compiled.files), [stem + end for end in (".json", ".stablehlo.mlirbc", ".xla")]) +
        difference("inputs", _own_inputs(action), [stem + ".spec.json", "fleet.f.exported"]) +
        _command_problems(action, "action compile", other) +
        _command_problems(only_action(compiled, "StagecOptimize"), "action optimize", other) +
        _command_problems(only_action(compiled, "StagecLower"), "action lower", other) +
        _command_problems(only_action(ctx.attr.own, "StagecCompile"), "action compile") +
        difference("bundle", [one.name for one in ctx.attr.bundle[AotBundleInfo].executables.to_list()], executables) +
        difference("packages", sorted(_repositories(inputs, "packages.json")), ["stagec_planning", "stagec_python"]) +
        _launcher_problems(ctx.attr.golden, other, other) +
        _launcher_problems(ctx.attr.reproducibility, other, other) +
        difference("what is built again", arguments.count("--executable\n"), 1) +
        difference("what is traced again", "--executables-only" in arguments, True) +
        difference("import roots", "--import-root" in arguments, False),
    )

jaxlib_test = analysis_test(_jaxlib_test_impl, {
    name: attr.label(doc = "Another target of the manifest.", aspects = [actions_of])
    for name in ("bundle", "golden", "own", "provenance", "reproducibility")
})

def _jaxlib_problems(targets, jaxlib, cached = [], jaxlibs = JAXLIBS, runs_on = []):
    """What is wrong with a plan of these targets and releases."""
    specs = {name: json.encode({"target": dict(target, name = name)}) for name, target in targets.items()}
    return compiled_executables({
        "path": "m.toml",
        "jaxlib": jaxlib,
        "runs_on": runs_on,
        "jax_cache": {"executables": {name: [] for name in cached}},
        "executables": [(name, "m.f", spec) for name, spec in specs.items()],
    }, jaxlibs).problems

def _jaxlib_problems_test_impl(ctx):
    cpu, cuda = {"platform": "cpu"}, {"platform": "cuda", "autotuning": "a.textproto"}
    declare = 'stagec.jaxlib(name = "NAME", lock = "//:NAME.lock"), or stagec_repositories(jaxlibs = {"NAME": {"lock": "//:NAME.lock"}})'
    unknown = 'm.toml: target "%s": jaxlib = ["%s"]: this workspace has jaxlib %s\n  declare a lock with jaxlib==%s (docs/fleet.md): %s'
    return verdict(
        ctx,
        difference("none", _jaxlib_problems({"a": cpu}, {"a": ["2.0.0", "1.0.0"]}, ["a"]), []) +
        difference(
            "releases",
            _jaxlib_problems({"a": cpu, "b": cpu}, {"a": ["3.0.0", "2.0.0"], "b": ["0.9"]}),
            [
                unknown % ("a", "3.0.0", "1.0.0 and 2.0.0", "3.0.0", declare),
                unknown % ("b", "0.9", "1.0.0 and 2.0.0", "0.9", declare),
            ],
        ) +
        difference(
            "an older one",
            _jaxlib_problems({"a": cpu, "g": {"platform": "cuda"}}, {"a": ["2.0.0"]}, runs_on = ["1.0.0"]),
            ['m.toml: target "a": runs_on = ["1.0.0"]: an older release never runs what a newer one made\n  add it to jaxlib'],
        ) +
        difference(
            "no other",
            _jaxlib_problems({"a": cpu}, {"a": ["2.0.0"]}, jaxlibs = JAXLIBS[:1]),
            [unknown % ("a", "2.0.0", "1.0.0", "2.0.0", declare)],
        ) +
        difference(
            "devices",
            _jaxlib_problems({"g": cuda}, {"g": ["2.0.0"]}),
            [
                'm.toml: target "g": autotuning is of the build\'s own jaxlib 1.0.0, which jaxlib = ["2.0.0"] leaves out\n' +
                "  add it, or leave autotuning out",
                'm.toml: target "g": jaxlib = ["2.0.0"]: nothing says what compiles for cuda with this jaxlib\n' +
                "  write cuda_lock beside its lock",
            ],
        ) +
        difference(
            "architectures",
            _jaxlib_problems({"arm": dict(cpu, architecture = "aarch64")}, {"arm": ["1.0.0", "2.0.0"]}),
            [
                'm.toml: target "arm": jaxlib = ["2.0.0"]: this workspace has it for x86_64\n' +
                "  declare one that makes code for aarch64 (docs/aarch64.md): architecture = \"aarch64\" beside its lock",
            ],
        ) +
        difference(
            "cache",
            _jaxlib_problems({"a": cpu}, {"a": ["2.0.0"]}, ["a"]),
            [
                'm.toml: target "a": jax_cache is of the build\'s own jaxlib 1.0.0, which jaxlib = ["2.0.0"] leaves out\n' +
                "  add it, or leave jax_cache out",
            ],
        ),
    )

jaxlib_problems_test = rule(
    implementation = _jaxlib_problems_test_impl,
    doc = "Passes if releases of jaxlib that cannot compile are refused, all of them together.",
    test = True,
)
