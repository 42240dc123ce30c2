"""One exported function, compiled for one target."""

load("//rules:providers.bzl", "AotExecutableInfo", "AotExportInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action", "examined_by")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:launcher.bzl", "label_of")
load("//rules/private:platforms.bzl", "MNEMONICS", "PLUGINS")

def _series(ctx, platform):
    """What all executables have in common that one process may compile, one after the other; "" for a process of its own.

    It has the whole target: a process may outlive an edit of the manifest.
    """
    if ctx.attr.isolation == "function" or PLUGINS[platform]:
        return ""
    spec = json.decode(ctx.attr.spec)
    return "%s %s %s" % (label_of(ctx.label).rpartition(":")[0], spec["manifest"], json.encode(spec["target"]))

def _aot_executable_impl(ctx):
    name = ctx.label.name
    platform = json.decode(ctx.attr.spec)["target"]["platform"]
    plugin = ctx.attr.plugin[PythonEnvironmentInfo] if ctx.attr.plugin else None
    if PLUGINS[platform] and not plugin:
        fail("%s is for %s, which takes a plugin: write plugin = \"@stagec_%s//:environment\"" %
             (ctx.label, platform, platform))
    exported = ctx.attr.export[AotExportInfo].exported
    lowered = ctx.attr.export[AotExportInfo].lowered if PLUGINS[platform] else None
    spec = ctx.actions.declare_file(name + ".spec.json")
    executable = ctx.actions.declare_file(name + ".xla")
    description = ctx.actions.declare_file(name + ".json")
    module = ctx.actions.declare_file(name + ".stablehlo.mlirbc")
    inventory = ctx.actions.declare_file(name + ".inventory.json")
    stablehlo = ctx.actions.declare_file(name + ".stablehlo.mlir")
    hlo_before = ctx.actions.declare_file(name + ".hlo_before.txt")
    hlo_after = ctx.actions.declare_file(name + ".hlo_after.txt")
    hlo_proto = ctx.actions.declare_file(name + ".hlo_after.pb")
    profile = ctx.actions.declare_file(name + ".profile.json")
    timeline = ctx.actions.declare_file(name + ".timeline.json")
    # For a reader. To optimize is to compile again, past all limits: somebody wants to see a program that is over one.
    # XLA keeps no PTX, so that is made again too.
    optimized = {"--hlo-after": hlo_after, "--hlo-proto": hlo_proto}
    ptx = []
    if platform == "cuda":
        ptx = [ctx.actions.declare_file(name + ".ptx")]
        optimized["--ptx"] = ptx[0]
    compiled = {
        "--output": executable,
        "--description": description,
        "--module": module,
        "--inventory": inventory,
        "--profile": profile,
    }
    ctx.actions.write(spec, ctx.attr.spec)

    # The first runs in a build. The others run when their output groups are asked for, and nothing has what they write as
    # an input.
    for action, mnemonic, progress, outputs, packages, series in [
        ("compile", MNEMONICS[platform], "Compiling", compiled, plugin, _series(ctx, platform)),
        ("lower", "StagecLower", "Lowering", {"--stablehlo": stablehlo, "--hlo-before": hlo_before}, None, ""),
        ("optimize", "StagecOptimize", "Optimizing", optimized, plugin, ""),
    ]:
        arguments = ctx.actions.args()
        # Errors begin with it: function, target and bucket in the one word that a user gives to Bazel. It is in
        # messages alone, so no byte depends on it.
        arguments.add("--label=" + label_of(ctx.label))
        arguments.add("--spec", spec)
        arguments.add("--exported", exported)
        if lowered:
            arguments.add("--lowered", lowered)
        for option, file in outputs.items():
            arguments.add(option, file)
        if series:
            arguments.add("--series=" + series)
        compiler_action(
            ctx,
            mnemonic = mnemonic,
            progress_message = "%s %s for %s" % (progress, name, platform),
            command = "action " + action,
            arguments = arguments,
            inputs = depset([spec, exported] + ([lowered] if lowered else [])),
            outputs = outputs.values(),
            plugin = packages,
            environment = ctx.attr.environment,
            examined = examined_by(ctx.attr.spec),
        )
    arguments = ctx.actions.args()
    arguments.add(hlo_after)
    arguments.add("--spec", spec)
    arguments.add("--description", description)
    arguments.add("--output", timeline)
    compiler_action(
        ctx,
        mnemonic = "StagecTimeline",
        progress_message = "Estimating the timeline of %s" % name,
        command = "action timeline",
        arguments = arguments,
        inputs = depset([hlo_after, spec, description]),
        outputs = [timeline],
        plugin = plugin,  # The figures of a TPU name the version of libtpu that they are for.
        environment = ctx.attr.environment,
        extension = extension_of(ctx.attr._insight),
        worker = False,
    )
    return [
        DefaultInfo(files = depset([executable, description, module])),
        OutputGroupInfo(
            hlo_after = depset([hlo_after]),
            hlo_before = depset([hlo_before]),
            hlo_proto = depset([hlo_proto]),
            inventory = depset([inventory]),
            profile = depset([profile]),
            ptx = depset(ptx),
            stablehlo = depset([stablehlo]),
            timeline = depset([timeline]),
        ),
        AotExecutableInfo(
            name = name,
            export = ctx.attr.export[AotExportInfo].name,
            executable = executable,
            description = description,
            module = module,
            inventory = inventory,
            hlo_proto = hlo_proto,
            profile = profile,
            platform = platform,
            plugin = plugin,
            environment = ctx.attr.environment[PythonEnvironmentInfo] if ctx.attr.environment else None,
            examined = examined_by(ctx.attr.spec),
            spec = spec,
        ),
    ]

aot_executable = rule(
    implementation = _aot_executable_impl,
    doc = "Compiles an exported function for one target and bucket. `aot_manifest` declares these.\n\n" +
          "`<name>.xla` is the executable, `<name>.json` its description, and `<name>.stablehlo.mlirbc` the module that XLA " +
          "compiled, for programs without Python. The action's mnemonic is StagecCompile, StagecCompileCuda or " +
          "StagecCompileTpu.\n\n" +
          "Output groups:\n\n" +
          "- `stablehlo`: `<name>.stablehlo.mlir`, the function for this target and bucket.\n" +
          "- `hlo_before` and `hlo_after`: `<name>.hlo_before.txt` and `<name>.hlo_after.txt`, its HLO before and after XLA " +
          "optimized it.\n" +
          "- `hlo_proto`: `<name>.hlo_after.pb`, the latter as HloModuleProto, with the elements of constants.\n" +
          "- `inventory`: `<name>.inventory.json`, its arrays, operations, exchanges and limits.\n" +
          "- `ptx`: `<name>.ptx`, the kernels of an executable for NVIDIA devices as PTX.\n" +
          "- `profile`: `<name>.profile.json`, the seconds that each phase took.\n" +
          "- `timeline`: `<name>.timeline.json`, an estimate of what a device does when in a call, for Perfetto.",
    attrs = {
        "spec": attr.string(doc = "The executable's spec, its part of the plan, as canonical JSON.", mandatory = True),
        "export": attr.label(doc = "The exported function.", mandatory = True, providers = [AotExportInfo]),
        "isolation": attr.string(
            default = "function",
            doc = "`manifest`: one process may compile this executable after others of its manifest, if they are for the same " +
                  "target of platform cpu. `function`: the executable has a process of its own.",
            values = ["function", "manifest"],
        ),
        "_insight": extension_attr("insight"),
        # Of an executable and not of the toolchain: Bazel fetches it when it analyses one that needs it, and it is on the path
        # of that compilation alone. With libtpu on the path, tracing would import it, and descriptions would say so.
        "plugin": attr.label(
            doc = "The Python environment with the compiler of the target's platform: `@stagec_cuda//:environment`, " +
                  "`@stagec_rocm//:environment` or `@stagec_tpu//:environment`; none for cpu.",
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        "environment": attr.label(
            doc = "The Python environment that compiles it instead of the toolchain's: its jaxlib makes the executable, " +
                  "which runs with that jaxlib alone, or its architecture. It needs jaxlib, numpy and flatbuffers, and no JAX.",
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
