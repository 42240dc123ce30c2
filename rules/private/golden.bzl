"""Golden inputs and outputs: what a function makes of generated or given inputs, and a test of executables with them."""

load("//rules:providers.bzl", "AotBundleInfo", "AotExecutableInfo", "AotExportInfo", "AotGoldenInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:bundle.bzl", "WEIGHTS_ATTR", "add_weights")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:imports.bzl", "execution_root_folders")
load("//rules/private:launcher.bzl", "shell_quote", "stagec_program")

def _aot_golden_impl(ctx):
    export = ctx.attr.export[AotExportInfo]
    golden = ctx.actions.declare_file(export.name + ".golden.safetensors")
    arguments = ctx.actions.args()
    arguments.add("--spec", export.spec)
    arguments.add("--exported", export.exported)
    arguments.add("--description", export.description)
    arguments.add("--output", golden)
    folders = execution_root_folders(export.import_roots, ctx.workspace_name, ctx.bin_dir.path)
    arguments.add_all(folders, format_each = "--import-root=%s")
    weights = add_weights(ctx, arguments)
    given = ctx.files.inputs
    arguments.add_all(given, format_each = "--inputs=%s")
    compiler_action(
        ctx,
        mnemonic = "StagecGolden",
        progress_message = "Running %s" % export.name,
        command = "action golden",
        arguments = arguments,
        inputs = depset([export.spec, export.exported, export.description] + weights + given),
        outputs = [golden],
        plugin = export.plugin,
        sources = export.sources,
        looked = export.looked,
        extension = export.extension,
        examined = export.examined,
    )
    return [
        DefaultInfo(files = depset([golden])),
        AotGoldenInfo(name = export.name, golden = golden, inputs = given),
    ]

aot_golden = rule(
    implementation = _aot_golden_impl,
    doc = "Runs a function, with `jax.jit` if JAX traces it, on CPUs and generated or given inputs: " +
          "`<export>.golden.safetensors`. `aot_manifest` declares one for each function with `golden`.",
    attrs = {
        "export": attr.label(doc = "The exported function.", mandatory = True, providers = [AotExportInfo]),
        "inputs": attr.label(
            doc = "The file of inputs that the manifest names; without it they are generated.",
            allow_single_file = [".npz"],
        ),
        "weights": WEIGHTS_ATTR,
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)

def _aot_golden_test_impl(ctx):
    info = ctx.attr.bundle[AotBundleInfo]
    plugins = [ctx.attr.plugin[PythonEnvironmentInfo]] if ctx.attr.plugin else []
    environment = ctx.attr.environment[PythonEnvironmentInfo] if ctx.attr.environment else None
    words = "%s --golden --allow-skipped --platform %s" % (shell_quote(info.bundle.short_path), ctx.attr.platform)
    run = "exec {stagec} run \"$workspace\"/%s \"$@\"\n" % words
    return stagec_program(ctx, run, [info.bundle] + info.weights, plugins, environment)

aot_golden_test = rule(
    implementation = _aot_golden_test_impl,
    doc = "Runs the executables of a bundle for one platform, as far as this machine can, with the golden inputs that are " +
          "in it, and compares the results. What it cannot run is skipped, and it says why. `aot_manifest` declares one for " +
          "each platform of a function with `golden`.",
    test = True,
    attrs = {
        "bundle": attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo]),
        "platform": attr.string(doc = "The platform of the targets: cpu, cuda, rocm or tpu.", default = "cpu"),
        "plugin": attr.label(
            doc = "The Python environment with what runs executables for the platform; none for cpu.",
            providers = [PythonEnvironmentInfo],
        ),
        "environment": attr.label(
            doc = "The Python environment that it runs in instead of the toolchain's: executables run with the jaxlib " +
                  "that made them.",
            providers = [PythonEnvironmentInfo],
        ),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)

def _aot_golden_optimized_test_impl(ctx):
    info = ctx.attr.bundle[AotBundleInfo]
    executables = [executable[AotExecutableInfo] for executable in ctx.attr.executables]
    words = [shell_quote(function) for function in ctx.attr.functions] + ["--platform", ctx.attr.platform]
    for executable in executables:
        # Its name in the bundle, which is without that of the manifest.
        name = executable.name[len(ctx.attr.bundle.label.name) + 1:]
        words += ["--hlo", "%s=\"$workspace\"/%s" % (shell_quote(name), shell_quote(executable.hlo_proto.short_path))]
    run = "exec {stagec} emulate \"$workspace\"/%s %s \"$@\"\n" % (shell_quote(info.bundle.short_path), " ".join(words))
    files = [info.bundle] + info.weights + [executable.hlo_proto for executable in executables]
    return stagec_program(ctx, run, files, extensions = [extension_of(ctx.attr._extension)])

aot_golden_optimized_test = rule(
    implementation = _aot_golden_optimized_test_impl,
    doc = "Runs on CPUs the programs that the compiler of a platform decided, with the golden inputs that are in a bundle, " +
          "and compares the results. It needs no device. `aot_manifest` declares one for each platform of functions with " +
          "`golden = { optimized = true }`.",
    test = True,
    attrs = {
        "bundle": attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo]),
        "executables": attr.label_list(
            doc = "Executables whose programs are not in their bytes: those for TPUs.",
            providers = [AotExecutableInfo],
        ),
        "functions": attr.string_list(doc = "Names of the functions, and variants, to run.", mandatory = True),
        "platform": attr.string(doc = "The platform of the targets: cuda, rocm or tpu.", mandatory = True),
        "_extension": extension_attr("insight"),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
