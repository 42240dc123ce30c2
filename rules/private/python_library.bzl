"""Python sources with the folders that they are imported from."""

load("//rules:providers.bzl", "PythonRulesInfo", "PythonSourcesInfo")

_ImportsInfo = provider(
    doc = "What python_imports found.",
    fields = {
        "imports": "depset of string: import roots, as in PythonSourcesInfo.",
        "sources": "depset of File: modules that providers of other rule sets name.",
    },
)

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
                    fail("%s: the import root %r is outside the repository" % (label, folder))
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
      targets: list of Target; those of an attribute with the aspect python_imports, with all that their providers name.

    Returns:
      depset of File.
    """
    return depset(transitive = [target[DefaultInfo].files for target in targets] + [
        target[DefaultInfo].default_runfiles.files
        for target in targets
        if target[DefaultInfo].default_runfiles
    ] + [target[_ImportsInfo].sources for target in targets if _ImportsInfo in target])

def _own_imports(target, ctx):
    """The import roots of a target alone. Rules of any rule set name theirs in the attribute `imports`."""
    named = getattr(ctx.rule.attr, "imports", None)
    named = [folder for folder in named if type(folder) == type("")] if type(named) == type([]) else []
    roots = import_roots(target.label, ctx.workspace_name, named)

    # Nothing imports `site-packages.x`, and of packages there may be hundreds, with a repository each.
    return roots[1:] if "site-packages" in named else roots

def _python_imports_impl(target, ctx):
    infos = [target[one] for one in ctx.attr._rules[PythonRulesInfo].providers if one in target]
    if PythonSourcesInfo in target:
        infos.append(target[PythonSourcesInfo])
    for name in _FOLLOWED:
        below = getattr(ctx.rule.attr, name, None)
        below = below if type(below) == type([]) else [below]
        infos += [one[_ImportsInfo] for one in below if type(one) == "Target" and _ImportsInfo in one]
    return [_ImportsInfo(
        imports = depset(_own_imports(target, ctx), transitive = [info.imports for info in infos]),
        sources = depset(transitive = [
            getattr(info, field)
            for info in infos
            for field in ("sources", "transitive_sources")
            if hasattr(info, field)
        ]),
    )]

_FOLLOWED = ["actual", "deps"]

python_imports = aspect(
    implementation = _python_imports_impl,
    doc = "Finds the import roots of Python targets of any rule set: by the attribute `imports` that all rules of the name " +
          "py_library have, and in the providers that the label flag `//rules:python_rules` names.",
    attr_aspects = _FOLLOWED,
    attrs = {"_rules": attr.label(default = Label("//rules:python_rules"), providers = [PythonRulesInfo])},
)

def imports_of(targets, workspace_name):
    """The import roots of targets.

    Args:
      targets: list of Target, of an attribute that has the aspect python_imports.
      workspace_name: name of the main repository.

    Returns:
      depset of string.
    """
    files = [target for target in targets if _ImportsInfo not in target]
    return depset(
        [repository_name(target.label, workspace_name) for target in files],
        transitive = [target[_ImportsInfo].imports for target in targets if _ImportsInfo in target],
    )

def _python_library_impl(ctx):
    sources = depset(ctx.files.srcs + ctx.files.data, transitive = [sources_of(ctx.attr.deps)])
    return [
        DefaultInfo(files = depset(ctx.files.srcs), runfiles = ctx.runfiles(transitive_files = sources)),
        PythonSourcesInfo(
            sources = sources,
            imports = depset(
                import_roots(ctx.label, ctx.workspace_name, ctx.attr.imports),
                transitive = [imports_of(ctx.attr.deps, ctx.workspace_name)],
            ),
        ),
    ]

python_library = rule(
    implementation = _python_library_impl,
    doc = "Python sources, and the folders that programs import them from, if that is not the repository's folder.",
    attrs = {
        "srcs": attr.label_list(doc = "The modules.", allow_files = True),
        "data": attr.label_list(doc = "Files that they read.", allow_files = True),
        "deps": attr.label_list(
            doc = "What they import: python_library, py_library of any rule set, filegroup or files.",
            allow_files = True,
            aspects = [python_imports],
        ),
        "imports": attr.string_list(doc = "Import roots besides the repository's folder, relative to the package."),
    },
)
