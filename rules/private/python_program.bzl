"""A Python program in a locked environment."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")
load("//rules/private:launcher.bzl", "ENVIRONMENT_ATTRS", "PYTHON_COMMAND", "environment_files", "expand_locations", "write_launcher")
load("//rules/private:python_library.bzl", "import_roots", "imports_of", "python_imports", "sources_of")

# The sources lie in their own folder in the runfiles: a program may be called as the package is that it runs.
_SOURCES = "_python/"

def _source_path(file, workspace_name):
    path = file.short_path
    return _SOURCES + (path[len("../"):] if path.startswith("../") else workspace_name + "/" + path)

def _python_program_impl(ctx):
    sources = depset([ctx.file.main] + ctx.files.srcs, transitive = [sources_of(ctx.attr.deps)])
    roots = {root: None for root in import_roots(ctx.label, ctx.workspace_name, ctx.attr.imports)}
    roots.update({root: None for root in imports_of(ctx.attr.deps, ctx.workspace_name).to_list()})

    environments = [one[PythonEnvironmentInfo] for one in [ctx.attr.environment] + ctx.attr.plugins]
    change_folder = ""
    if ctx.attr.run_in_working_directory:
        change_folder = "cd \"${BUILD_WORKING_DIRECTORY:-.}\"\n"
    command = "exec %s \"$runfiles\"/'%s'" % (
        PYTHON_COMMAND,
        _source_path(ctx.file.main, ctx.workspace_name),
    )
    words = [command] + [expand_locations(ctx, word, ctx.attr.data) for word in ctx.attr.arguments] + ["\"$@\"\n"]
    body = change_folder + " ".join(words)
    script = write_launcher(ctx, [_SOURCES + root for root in roots], ctx.attr.env, body, environments)

    runfiles = ctx.runfiles(
        files = ctx.files.data + environment_files(environments),
        root_symlinks = {_source_path(file, ctx.workspace_name): file for file in sources.to_list()},
    )
    for target in ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = script, files = depset([script]), runfiles = runfiles)]

python_program = rule(
    implementation = _python_program_impl,
    doc = "A Python program for `bazel run`. The built file also starts without Bazel.",
    executable = True,
    attrs = dict(
        ENVIRONMENT_ATTRS,
        main = attr.label(doc = "The file to run.", mandatory = True, allow_single_file = [".py"]),
        srcs = attr.label_list(doc = "More modules of the program.", allow_files = True),
        deps = attr.label_list(
            doc = "What it imports: python_library, py_library of any rule set, filegroup or files.",
            allow_files = True,
            aspects = [python_imports],
        ),
        data = attr.label_list(doc = "Files that it reads.", allow_files = True),
        imports = attr.string_list(doc = "Import roots besides the repository's folder, relative to the package."),
        arguments = attr.string_list(
            doc = "Arguments before those of the command line. `$(location LABEL)` is the absolute path of a file " +
                  "of `data`.",
        ),
        plugins = attr.label_list(
            doc = "More Python environments whose packages it finds, behind those of `environment`.",
            providers = [PythonEnvironmentInfo],
        ),
        run_in_working_directory = attr.bool(
            doc = "Whether `bazel run` starts it in your folder, so that you can write relative paths on the command line.",
        ),
    ),
)
