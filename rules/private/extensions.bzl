"""Extensions of the compiler: packages beside it, which only the actions and programs have that use them."""

load("//rules:providers.bzl", "PythonSourcesInfo")

def extension_attr(name):
    """An attribute of a rule whose actions or programs use an extension.

    Args:
      name: string, its folder in compiler/extensions.

    Returns:
      Attribute.
    """
    return attr.label(
        default = Label("//compiler/extensions/%s:%s" % (name, name)),
        providers = [PythonSourcesInfo],
        cfg = "exec",
    )

def extension_of(target):
    """What actions and programs need of an extension.

    Args:
      target: Target, of an attribute that `extension_attr` made.

    Returns:
      struct: `sources`, a depset of File; `repository` and `folder`, where the package is; `tool`, a FilesToRunProvider
      whose change starts a new worker.
    """
    return struct(
        sources = target[PythonSourcesInfo].sources,
        repository = target.label.workspace_name,
        folder = target.label.package,
        tool = target[DefaultInfo].files_to_run,
    )

def extension_path(extension):
    """The import root of an extension in actions.

    Args:
      extension: struct, as extension_of returns it.

    Returns:
      string, relative to the execution root.
    """
    return ("external/%s/" % extension.repository if extension.repository else "") + extension.folder
