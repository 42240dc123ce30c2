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
      struct: `sources`, a depset of File; `repository` and `folder`, where the package is; `path`, the same from the
      execution root; `tool`, a FilesToRunProvider whose change starts a new worker.
    """
    repository, folder = target.label.workspace_name, target.label.package
    return struct(
        sources = target[PythonSourcesInfo].sources,
        repository = repository,
        folder = folder,
        path = ("external/%s/" % repository if repository else "") + folder,
        tool = target[DefaultInfo].files_to_run,
    )
