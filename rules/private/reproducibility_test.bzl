"""A test that artifacts have the same bytes wherever and whenever they are built."""

load("//rules:providers.bzl", "AotExecutableInfo", "AotExportInfo", "AotJaxCacheInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:launcher.bzl", "environment_files", "examined_rows", "plugin_words", "plugins_of", "shell_quote", "stagec_program")

def _aot_reproducibility_test_impl(ctx):
    stagec = ctx.toolchains[TOOLCHAIN_TYPE].stagec
    exports = [target[AotExportInfo] for target in ctx.attr.exports]
    executables = [target[AotExecutableInfo] for target in ctx.attr.executables]

    # An executable is built again from its export, which need not be tested itself; another environment cannot trace.
    environment = ctx.attr.environment[PythonEnvironmentInfo] if ctx.attr.environment else stagec.environment
    traced = [] if ctx.attr.environment else exports
    roots = {root: None for export in traced for root in export.import_roots}
    lines = [] if traced else ["--executables-only"]
    for root in roots:
        lines += ["--import-root", "../" + root]
    files = []
    for export in exports:
        words = [export.name, export.spec, export.exported, export.description]
        lines += ["--export", ":".join([getattr(word, "short_path", word) for word in words])]
        files += words[1:]
        if export.lowered:
            lines += ["--lowered", "%s=%s" % (export.name, export.lowered.short_path)]
            files.append(export.lowered)
    for one in executables:
        words = [one.name, one.export, one.spec, one.executable, one.description]
        lines += ["--executable", ":".join([getattr(word, "short_path", word) for word in words])]
        files += [one.spec, one.executable, one.description]
    entries = ctx.attr.jax_cache[AotJaxCacheInfo].entries if ctx.attr.jax_cache else []
    for one in entries:
        lines += ["--jax-entry", ":".join([one.name, one.spec.short_path, one.key.short_path, one.executable.short_path])]
        files += [one.spec, one.key, one.executable]
    plugins = plugins_of(traced, executables + entries)
    arguments = ctx.actions.declare_file(ctx.label.name + ".arguments")
    ctx.actions.write(arguments, "\n".join(lines) + "\n")

    words = "@%s %s" % (shell_quote(arguments.short_path), plugin_words(plugins, ctx.workspace_name))
    body = "cd \"$workspace\"\nexec {stagec} reproduce %s \"$@\"\n" % words
    extensions = [export.extension for export in traced if export.extension][:1]
    rows = examined_rows(traced + executables + entries, [environment] + plugins.values())
    files += [arguments] + environment_files(plugins.values())
    return stagec_program(ctx, body, files, [], environment, extensions, rows, [export.sources for export in traced])

aot_reproducibility_test = rule(
    implementation = _aot_reproducibility_test_impl,
    doc = "Builds artifacts twice again, in fresh processes that differ in folder, HOME, time zone, locale, hash seed, " +
          "cores, umask, user and (with libfaketime) clock, and compares the bytes with those that Bazel built. It " +
          "shows the first layer that differs. `aot_programs` declares one, and `aot_manifest`, unless the manifest says " +
          "`reproducible = false`.",
    test = True,
    attrs = {
        "exports": attr.label_list(
            doc = "The exported functions. Those of the executables must be among them.",
            providers = [AotExportInfo],
        ),
        "executables": attr.label_list(doc = "The executables.", providers = [AotExecutableInfo]),
        "jax_cache": attr.label(doc = "A folder of JAX's compilation cache.", providers = [AotJaxCacheInfo]),
        "environment": attr.label(
            doc = "The Python environment that compiled the executables, if it is not the toolchain's. It builds them again, " +
                  "from the exported functions, which it does not trace.",
            providers = [PythonEnvironmentInfo],
        ),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
