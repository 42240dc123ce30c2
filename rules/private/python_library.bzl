"""Python sources with the folders that they are imported from."""

load("//rules:providers.bzl", "PythonSourcesInfo")

def repository_name(label, workspace_name):
    """The folder name of a label's repository in runfiles."""
    return label.workspace_name or workspace_name

def import_roots(label, workspace_name, imports):
    """The import roots that a target at `label` adds: its repository, and `imports` relative to its package.

    Args:
      label: the target's label.
      workspace_name: name of the main repository.
      imports: folders relative to the package.

    Returns:
      list of string, relative to the folder that holds all repositories.
    """
    repository = repository_name(label, workspace_name)
    roots = [repository]
    for folder in imports:
        parts = [repository] + [part for part in label.package.split("/") if part]
        for part in folder.split("/"):
            if part == "..":
                if len(parts) == 1:
                    fail("%s: the import root %r is outside of the repository" % (label, folder))
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        root = "/".join(parts)
        if root not in roots:
            roots.append(root)
    return roots

def sources_of(targets):
    """All files of targets that any rule made, Python rules of other rule sets included.

    Args:
      targets: list of Target.

    Returns:
      depset of File.
    """
    return depset(transitive = [target[DefaultInfo].files for target in targets] + [
        target[DefaultInfo].default_runfiles.files
        for target in targets
        if target[DefaultInfo].default_runfiles
    ])

def imports_of(targets):
    """The import roots of targets.

    Args:
      targets: list of Target.

    Returns:
      depset of string.
    """
    return depset(transitive = [target[PythonSourcesInfo].imports for target in targets if PythonSourcesInfo in target])

def _python_library_impl(ctx):
    sources = depset(ctx.files.srcs + ctx.files.data, transitive = [sources_of(ctx.attr.deps)])
    return [
        DefaultInfo(files = depset(ctx.files.srcs), runfiles = ctx.runfiles(transitive_files = sources)),
        PythonSourcesInfo(
            sources = sources,
            imports = depset(
                import_roots(ctx.label, ctx.workspace_name, ctx.attr.imports),
                transitive = [imports_of(ctx.attr.deps)],
            ),
        ),
    ]

python_library = rule(
    implementation = _python_library_impl,
    doc = "Python sources, and the folders that programs import them from, if that is not the repository's folder.",
    attrs = {
        "srcs": attr.label_list(doc = "The modules.", allow_files = True),
        "data": attr.label_list(doc = "Files that they read.", allow_files = True),
        "deps": attr.label_list(doc = "What they import: python_library, filegroup or files.", allow_files = True),
        "imports": attr.string_list(doc = "Import roots besides the repository's folder, relative to the package."),
    },
)
