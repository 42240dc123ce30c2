"""What functions look for when they are imported: so a file that is added builds nothing again that does not."""

load("//rules:providers.bzl", "AotImportsInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:python_library.bzl", "import_roots", "imports_of", "python_imports", "sources_of")

def execution_root_folders(roots, main_repository, bin_dir):
    """Where import roots lie for an action: in the source tree, and in the output tree for generated sources.

    Args:
      roots: list of string, as in AotExportInfo.
      main_repository: string, its name.
      bin_dir: string, path of the output tree.

    Returns:
      list of string, relative to the execution root.
    """
    folders = []
    for root in roots:
        repository, _, folder = root.partition("/")
        parts = ([] if repository == main_repository else ["external", repository]) + ([folder] if folder else [])
        path = "/".join(parts)
        folders += [path or ".", bin_dir + "/" + path if path else bin_dir]
    return folders

def import_roots_of(ctx):
    """The import roots of a rule with deps and imports: its repository's and its own first, then what deps bring.

    Args:
      ctx: the rule's context.

    Returns:
      list of string.
    """
    roots = {ctx.workspace_name: None}
    roots.update({root: None for root in import_roots(ctx.label, ctx.workspace_name, ctx.attr.imports)})
    roots.update({root: None for root in imports_of(ctx.attr.deps, ctx.workspace_name).to_list()})
    return roots.keys()

def _aot_imports_impl(ctx):
    sources = depset(transitive = [sources_of(ctx.attr.deps), sources_of(ctx.attr.data)])
    names = ctx.actions.declare_file(ctx.label.name + "/names.txt")
    content = ctx.actions.args()
    content.set_param_file_format("multiline")
    content.add_all(sources)
    ctx.actions.write(names, content)
    looked = {function: ctx.actions.declare_file("%s/%s.json" % (ctx.label.name, function)) for function in ctx.attr.functions}
    if looked:
        arguments = ctx.actions.args()
        arguments.add("--names", names)
        folders = execution_root_folders(import_roots_of(ctx), ctx.workspace_name, ctx.bin_dir.path)
        arguments.add_all(folders, format_each = "--import-root=%s")
        for function, modules in ctx.attr.functions.items():
            arguments.add("--function")
            arguments.add(looked[function])
            arguments.add(",".join(modules))
        compiler_action(
            ctx,
            mnemonic = "StagecImports",
            progress_message = "Reading the imports of %s" % ctx.label.name,
            command = "action imports",
            arguments = arguments,
            inputs = depset([names], transitive = [sources]),
            outputs = looked.values(),
            worker = False,
            sandbox = False,
        )
    return [AotImportsInfo(names = names, looked = looked)]

aot_imports = rule(
    implementation = _aot_imports_impl,
    doc = "Reads what the modules of functions import. `aot_manifest` declares one for all functions that have the same `deps`.",
    attrs = {
        "functions": attr.string_list_dict(doc = "The modules of each function, by the name of its export."),
        "deps": attr.label_list(doc = "As for the exports.", allow_files = True, aspects = [python_imports]),
        "data": attr.label_list(doc = "As for the exports.", allow_files = True),
        "imports": attr.string_list(doc = "As for the exports."),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
