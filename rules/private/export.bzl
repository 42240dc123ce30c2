"""One function, traced and exported."""

load("//rules:providers.bzl", "AotExportInfo", "AotImportsInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action", "examined_by")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:imports.bzl", "execution_root_folders", "import_roots_of")
load("//rules/private:python_library.bzl", "python_imports", "sources_of")

def _aot_export_impl(ctx):
    name = ctx.label.name
    plugin = ctx.attr.plugin[PythonEnvironmentInfo] if ctx.attr.plugin else None
    spec = ctx.actions.declare_file(name + ".spec.json")
    exported = ctx.actions.declare_file(name + ".exported")
    description = ctx.actions.declare_file(name + ".exported.json")
    debug = ctx.actions.declare_file(name + ".debug.mlir")
    profile = ctx.actions.declare_file(name + ".profile.json")
    extension = extension_of(ctx.attr._arrays) if json.decode(ctx.attr.spec).get("frontend") == "arrays" else None
    groups = {"debug": depset([debug]), "description": depset([description]), "profile": depset([profile])}
    ctx.actions.write(spec, ctx.attr.spec)
    written = {"--output": exported, "--description": description, "--profile": profile}
    lowered = None
    if json.decode(ctx.attr.spec).get("devices"):
        lowered = ctx.actions.declare_file(name + ".lowered")
        written["--lowered"] = lowered

    sources = depset(transitive = [sources_of(ctx.attr.deps), sources_of(ctx.attr.data)])

    roots = import_roots_of(ctx)
    folders = execution_root_folders(roots, ctx.workspace_name, ctx.bin_dir.path)
    looked = None
    if ctx.attr.looked:
        known = ctx.attr.looked[AotImportsInfo]
        looked = struct(names = known.names, imports = known.looked[name])

    # The first runs in a build. The others run when their output group is asked for, and nothing has what they write as
    # an input.
    runs = [
        ("export", "StagecExport", "Exporting", written),
        ("locations", "StagecDebug", "Locating", {"--output": debug}),
    ]
    if ":" in json.decode(ctx.attr.spec).get("entry", ""):  # a function, and no StableHLO module
        jaxpr = ctx.actions.declare_file(name + ".jaxpr.txt")
        runs.append(("jaxpr", "StagecJaxpr", "Tracing", {"--output": jaxpr}))
        groups["jaxpr"] = depset([jaxpr])
    for action, mnemonic, progress, outputs in runs:
        arguments = ctx.actions.args()
        for option, file in outputs.items():
            arguments.add(option, file)
        arguments.add("--spec", spec)
        arguments.add_all(folders, format_each = "--import-root=%s")
        compiler_action(
            ctx,
            mnemonic = mnemonic,
            progress_message = "%s %s" % (progress, name),
            command = "action " + action,
            arguments = arguments,
            inputs = depset([spec]),
            outputs = outputs.values(),
            plugin = plugin,
            sources = sources,
            looked = looked,
            extension = extension,
            examined = examined_by(ctx.attr.spec),
        )
    return [
        DefaultInfo(files = depset([exported])),
        OutputGroupInfo(**groups),
        AotExportInfo(
            name = name,
            exported = exported,
            lowered = lowered,
            plugin = plugin,
            examined = examined_by(ctx.attr.spec),
            description = description,
            profile = profile,
            spec = spec,
            sources = sources,
            looked = looked,
            extension = extension,
            import_roots = roots,
        ),
    ]

aot_export = rule(
    implementation = _aot_export_impl,
    doc = "Traces one function and writes it as `<name>.exported`. `aot_manifest` declares these.\n\n" +
          "For targets that are not CPUs it also writes `<name>.lowered`: the modules that JAX lowers for their devices, if " +
          "they differ from the exported one. Executables are made of them.\n\n" +
          "Output groups:\n\n" +
          "- `description`: `<name>.exported.json`, what the artifact was made from.\n" +
          "- `debug`: `<name>.debug.mlir`, its StableHLO with the source location of every operation.\n" +
          "- `jaxpr`: `<name>.jaxpr.txt`, what JAX traced.\n" +
          "- `profile`: `<name>.profile.json`, the seconds that each phase took.",
    attrs = {
        "spec": attr.string(doc = "The function's spec, its part of the plan, as canonical JSON.", mandatory = True),
        "deps": attr.label_list(
            doc = "What the function's module imports: anything that has files (filegroup, python_library, py_library " +
                  "of any rule set, packages of `pip`, .py files). The import roots are the repositories' own folders, and " +
                  "those that the `imports` of a library add. Installed packages come behind those of the lock.",
            allow_files = True,
            aspects = [python_imports],
        ),
        "data": attr.label_list(doc = "Files that tracing reads, such as safetensors headers.", allow_files = True),
        "looked": attr.label(
            doc = "What reads the imports of the function, with the same `deps`, `data` and `imports`. Without it, another " +
                  "file in `deps` exports the function again.",
            providers = [AotImportsInfo],
        ),
        "imports": attr.string_list(doc = "More import roots, relative to the package."),
        "plugin": attr.label(
            doc = "The Python environment that JAX needs to lower the function's kernels, if any: " +
                  "`@stagec_cuda//:environment`.",
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        "_arrays": extension_attr("arrays"),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
