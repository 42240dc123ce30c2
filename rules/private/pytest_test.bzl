"""Tests that pytest runs."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")
load("//rules/private:launcher.bzl", "ENVIRONMENT_ATTRS", "PYTHON_COMMAND", "environment_files", "shell_quote", "write_launcher")
load("//rules/private:python_library.bzl", "import_roots", "imports_of", "python_imports", "sources_of")

_BODY = """cd "$workspace"
options=(-p no:cacheprovider)
[[ -z "${{XML_OUTPUT_FILE:-}}" ]] || options+=("--junitxml=$XML_OUTPUT_FILE")
[[ -z "${{TESTBRIDGE_TEST_ONLY:-}}" ]] || options+=(-k "$TESTBRIDGE_TEST_ONLY")
[[ -z "${{TEST_TMPDIR:-}}" ]] || options+=("--basetemp=$TEST_TMPDIR/pytest")
exec {python} -m pytest "${{options[@]}}" {arguments} "$@"
"""

def _pytest_test_impl(ctx):
    roots = {root: None for root in import_roots(ctx.label, ctx.workspace_name, ctx.attr.imports)}
    roots.update({root: None for root in imports_of(ctx.attr.deps, ctx.workspace_name).to_list()})
    environments = [one[PythonEnvironmentInfo] for one in [ctx.attr.environment] + ctx.attr.plugins]
    body = _BODY.format(
        python = PYTHON_COMMAND,
        arguments = " ".join([shell_quote(word) for word in ctx.attr.options] + [
            shell_quote(file.short_path)
            for file in ctx.files.srcs
        ]),
    )
    script = write_launcher(ctx, roots.keys(), ctx.attr.env, body, environments)

    runfiles = ctx.runfiles(
        files = ctx.files.srcs + ctx.files.data + environment_files(environments),
        transitive_files = sources_of(ctx.attr.deps),
    )
    for target in ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = script, runfiles = runfiles)]

pytest_test = rule(
    implementation = _pytest_test_impl,
    doc = "Runs pytest on `srcs`, in the runfiles. `--test_filter` is pytest's -k; Bazel gets pytest's own report.",
    test = True,
    attrs = dict(
        ENVIRONMENT_ATTRS,
        srcs = attr.label_list(doc = "The test modules.", mandatory = True, allow_files = [".py"]),
        deps = attr.label_list(
            doc = "What they import: python_library, py_library of any rule set, filegroup or files, conftest.py too.",
            allow_files = True,
            aspects = [python_imports],
        ),
        data = attr.label_list(doc = "Files that they read, also pytest's configuration.", allow_files = True),
        imports = attr.string_list(doc = "Import roots besides the repository's folder, relative to the package."),
        options = attr.string_list(doc = "Options of pytest."),
        plugins = attr.label_list(
            doc = "More Python environments whose packages the tests find, behind those of `environment`.",
            providers = [PythonEnvironmentInfo],
        ),
    ),
)
