"""JAX's persistent compilation cache, built.

A program of `jax.jit` is another one than the bundle's: it has JAX's calling convention, and names of results. So actions
of their own lower and compile each signature once more.
"""

load("//rules:providers.bzl", "AotExecutableInfo", "AotExportInfo", "AotJaxCacheInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:imports.bzl", "execution_root_folders")

def _key(ctx, export, executable, committed):
    """Declares what JAX looks the executable up by, which has the module that it compiles."""
    key = ctx.actions.declare_file("%s/%s.key" % (ctx.label.name + ".parts", executable.name))
    arguments = ctx.actions.args()
    arguments.add("--output", key)
    arguments.add("--executable", executable.spec)
    arguments.add("--spec", export.spec)
    arguments.add_all(committed, before_each = "--committed")
    arguments.add_all(
        execution_root_folders(export.import_roots, ctx.workspace_name, ctx.bin_dir.path),
        format_each = "--import-root=%s",
    )
    compiler_action(
        ctx,
        mnemonic = "StagecJaxKey",
        progress_message = "Lowering %s for JAX's cache" % executable.name,
        command = "action jax-key",
        arguments = arguments,
        inputs = depset([export.spec, executable.spec]),
        outputs = [key],
        plugin = export.plugin,
        sources = export.sources,
        looked = export.looked,
        examined = export.examined,
    )
    return key

def jax_cache_entry(ctx, executable, key, machines = [], series = "", has_costs = False):
    """Declares an executable of a key, and the names that it has in the cache.

    Args:
      ctx: the rule's context; the rule asks for TOOLCHAIN_TYPE.
      executable: struct or AotExecutableInfo: `name`, `spec` (File), `platform`, `examined`, and `plugin`
        (PythonEnvironmentInfo or None).
      key: File, what JAX looks it up by, which has the module to compile.
      machines: list of string, fingerprints of machines to name it for.
      series: string, what all those have in common that one process may compile, one after the other; "" for a process of
        its own.
      has_costs: whether to write what it takes, for a report.

    Returns:
      struct: what AotJaxCacheInfo has of it.
    """
    prefix = "%s/%s" % (ctx.label.name + ".parts", executable.name)
    compiled = ctx.actions.declare_file(prefix + ".xla")
    names = ctx.actions.declare_file(prefix + ".json")
    arguments = ctx.actions.args()
    arguments.add("--label=%s" % executable.name)
    arguments.add("--spec", executable.spec)
    arguments.add("--key", key)
    arguments.add("--output", compiled)
    arguments.add("--entry", names)
    costs = [ctx.actions.declare_file(prefix + ".costs.json")] if has_costs else []
    arguments.add_all(costs, before_each = "--costs")
    arguments.add_all(machines, before_each = "--machine")
    if series:
        arguments.add("--series=" + series)
    compiler_action(
        ctx,
        mnemonic = "StagecJaxCompile",
        progress_message = "Compiling %s for JAX's cache" % executable.name,
        command = "action jax-compile",
        arguments = arguments,
        inputs = depset([executable.spec, key]),
        outputs = [compiled, names] + costs,
        plugin = executable.plugin,
        examined = executable.examined,
    )
    return struct(
        name = executable.name,
        names = names,
        executable = compiled,
        costs = (costs + [None])[0],
        spec = executable.spec,
        key = key,
        platform = executable.platform,
        plugin = executable.plugin,
        examined = executable.examined,
    )

def jax_cache_folder(ctx, manifest, entries, groups = {}):
    """Declares the folder with all entries, and the same as a layer of an image.

    Args:
      ctx: the rule's context; the rule asks for TOOLCHAIN_TYPE.
      manifest: string, what messages call the file that lists the programs.
      entries: list of what `jax_cache_entry` returns.
      groups: more output groups.

    Returns:
      list of providers.
    """
    folder = ctx.actions.declare_directory(ctx.label.name)
    layer = ctx.actions.declare_file(ctx.label.name + ".tar")
    arguments = ctx.actions.args()
    arguments.add("--manifest=" + manifest)
    arguments.add("--output", folder.path)
    arguments.add("--layer", layer)
    inputs = []
    for one in entries:
        arguments.add("--entry", ":".join([one.name, one.names.path, one.executable.path]))
        inputs += [one.names, one.executable]
    compiler_action(
        ctx,
        mnemonic = "StagecJaxCache",
        progress_message = "Writing JAX's compilation cache %s" % ctx.label.name,
        command = "action jax-cache",
        arguments = arguments,
        inputs = depset(inputs),
        outputs = [folder, layer],
        worker = False,
    )
    return [
        DefaultInfo(files = depset([folder]), runfiles = ctx.runfiles([folder])),
        OutputGroupInfo(layer = depset([layer]), **groups),
        AotJaxCacheInfo(folder = folder, layer = layer, entries = entries),
    ]

def _aot_jax_cache_impl(ctx):
    exports = {target[AotExportInfo].name: target[AotExportInfo] for target in ctx.attr.exports}
    entries = []
    for target in ctx.attr.executables:
        executable = target[AotExecutableInfo]
        if executable.export not in exports:
            fail("%s: %s is of %s, which is not in exports" % (ctx.label, target.label, executable.export))
        name = target.label.name
        key = _key(ctx, exports[executable.export], executable, ctx.attr.committed.get(name, []))
        entries.append(jax_cache_entry(ctx, executable, key, ctx.attr.machines.get(name, [])))
    return jax_cache_folder(ctx, ctx.attr.manifest, entries)

aot_jax_cache = rule(
    implementation = _aot_jax_cache_impl,
    doc = "Writes the folder `<name>`, which JAX programs use as their persistent compilation cache: what they would " +
          "compile for each of the executables. JAX lowers each function as under `jax.jit` (StagecJaxKey), XLA compiles " +
          "that module to the same bytes in each build (StagecJaxCompile). docs/with-jax.md has the details. " +
          "`aot_manifest` declares it, if the manifest has `jax_cache`. The output group `layer` is the folder as " +
          "`<name>.tar`, a layer of an image.",
    attrs = {
        "manifest": attr.string(doc = "What messages call the manifest."),
        "exports": attr.label_list(doc = "The functions.", mandatory = True, providers = [AotExportInfo]),
        "executables": attr.label_list(
            doc = "The executables. What they say of function, target and bucket counts; they are not built for this.",
            mandatory = True,
            providers = [AotExecutableInfo],
        ),
        "committed": attr.string_list_dict(
            doc = "For executables by name, the ways in which programs call them: the positions of the arguments that are " +
                  "arrays on a device that the program chose, such as \"0,2\". Default: none.",
        ),
        "machines": attr.string_list_dict(
            doc = "For executables by name, fingerprints of the machines that find them without the import of " +
                  "`stagec.jax_cache`: what `python -m stagec.jax_cache` prints there.",
        ),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
