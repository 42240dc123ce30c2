"""Targets of tests. Each folder of tests/ has a BUILD file, which says what is special about its tests."""

load("//rules:defs.bzl", "pytest_test", "python_program")
load("//rules:providers.bzl", "PythonEnvironmentInfo")

# What is built of tests/zoo, first the bundle: see the fixture `zoo` in conftest.py.
ZOO = [
    "//tests/zoo:zoo",
    "//tests/zoo:parts",
]

ENVIRONMENT = "@stagec_tests//:environment"
NEWEST = "@stagec_tests_newest//:environment"

VISIBILITY = [
    "//compiler/extensions:__pkg__",
    "//tests:__pkg__",
]

def _byte_code_impl(ctx):
    python = "-".join(ctx.attr.environment[PythonEnvironmentInfo].abi.split("-")[:2])  # cpython-311
    compiled = {}
    args = ctx.actions.args()
    modules = [file for file in ctx.files.srcs if file.extension == "py"]
    for source in modules:
        folder, _, name = source.short_path.rpartition("/")
        path = "%s/__pycache__/%s.%s.pyc" % (folder, name[:-len(".py")], python)
        compiled[path] = ctx.actions.declare_file("%s/%s" % (ctx.label.name, path))
        args.add(source)
        args.add(compiled[path])
    ctx.actions.run(
        executable = ctx.executable.program,
        arguments = [args],
        inputs = modules,
        outputs = compiled.values(),
        mnemonic = "StagecTestsByteCode",
        progress_message = "Compiling stagec's modules for %s" % python,
    )
    return [DefaultInfo(runfiles = ctx.runfiles(symlinks = compiled))]

_byte_code = rule(
    implementation = _byte_code_impl,
    doc = "Byte code of modules, which tests find beside them.",
    attrs = {
        "srcs": attr.label_list(doc = "The modules.", allow_files = [".py"]),
        "environment": attr.label(doc = "The Python environment of the tests.", providers = [PythonEnvironmentInfo]),
        "program": attr.label(doc = "byte_code.py in that environment.", executable = True, cfg = "exec"),
    },
)

def byte_code(name, environment, extensions):
    """Compiles stagec's modules, once for all tests of an environment.

    Tests start some thousands of processes that import stagec. Without byte code each compiles what it imports.

    Args:
      name: of the target.
      environment: the Python environment of the tests.
      extensions: names of extensions, whose modules are compiled too.
    """
    python_program(
        name = name + "_program",
        testonly = True,
        environment = environment,
        main = "byte_code.py",
        tags = ["manual"],
    )
    _byte_code(
        name = name,
        testonly = True,
        srcs = ["//compiler:actions"] + ["//compiler/extensions/" + one for one in extensions],
        environment = environment,
        program = name + "_program",
        tags = ["manual"],
        visibility = [
            "//compiler/extensions:__subpackages__",
            "//tests:__subpackages__",
        ],
    )

def python_test(name, srcs = [], data = [], deps = [], env = {}, zoo = [], environment = ENVIRONMENT, **more):
    """Runs tests with the packages of tests/requirements.lock.

    Args:
      name: "x_test" for the file test_x.py.
      srcs: other files in its place.
      data: files that the tests read.
      deps: what they import besides the support that all tests have.
      env: environment variables.
      zoo: ZOO, for tests that have the fixture `zoo`.
      environment: another Python environment.
      **more: other attributes of pytest_test.
    """
    pytest_test(
        name = name,
        srcs = srcs or ["test_%s.py" % name[:-len("_test")]],
        data = data + zoo + ["//tests:newest_byte_code" if environment == NEWEST else "//tests:byte_code"],
        deps = deps + ["//tests:support"],
        env = dict(env, STAGEC_ZOO = "$(location %s)" % zoo[0]) if zoo else env,
        environment = environment,
        **more
    )

def package_tests(name, size = "medium", parts = {}, exhaustive = {}, imports_jax = True, env = {}):
    """The tests of a package of compiler/stagec, which are all of a folder.

    They run with the JAX that the locks pin (`x_test`), and some with the newest, which has no wheels for older Pythons.
    The tag "pinned" is of tests that one run is enough for: no other Bazel, Python or JAX changes what they find. Of a
    test with more than eight cases, another version runs each fourth case.

    Args:
      name: "x_test" for the package x.
      size: "large" for tests that may take more than the five minutes of a medium one, where other work runs too.
      parts: names of more tests, and the files of each: what takes so long that everything would wait for it, where it
        began last.
      exhaustive: names of more tests, and the files of each: those that try one thing on hundreds of programs. They are
        in the suite :thorough, and not in `//...`.
      imports_jax: whether each eighth test, and each sixteenth of `exhaustive`, also runs with the newest JAX
        (`x_newest_test`). False for a package that imports no JAX: each thirty-second runs with its Python, in
        //tests:newest_test.
      env: environment variables of the tests with the pinned JAX.
    """
    others = dict(parts, **exhaustive)
    apart = [file for files in others.values() for file in files]
    tests = dict({name: native.glob(["test_*.py"], exclude = apart)}, **others)
    files = native.glob(["**"], exclude = ["BUILD"])
    newest = []
    for test, srcs in tests.items():
        common = {
            "size": "large" if test in exhaustive else size,
            "srcs": srcs,
            "data": ["//tests:data_of_packages"] + files,
        }
        python_test(
            name = test,
            env = env,
            tags = ["pinned"] + (["manual"] if test in exhaustive else []),
            zoo = ZOO,
            **common
        )
        if imports_jax:
            newest.append(test[:-len("_test")] + "_newest_test")
            python_test(
                name = newest[-1],
                env = {"STAGEC_EACH_TEST": "16" if test in exhaustive else "8"},
                environment = NEWEST,
                tags = ["manual"],
                zoo = ["//tests:newest_zoo"],
                **common
            )
    groups = {"files": files, "tests": native.glob(["test_*.py"])}
    suites = {"other_versions": newest, "thorough": exhaustive.keys()}
    for suite in [suite for suite, members in suites.items() if members]:
        native.test_suite(
            name = suite,
            tags = ["manual"],
            tests = suites[suite],
            visibility = VISIBILITY,
        )
    for group, members in ({} if imports_jax else groups).items():
        native.filegroup(
            name = group,
            srcs = members,
            visibility = VISIBILITY,
        )
    sources()

def sources():
    """The Python files of a folder, for tests of all code."""
    native.filegroup(
        name = "sources",
        srcs = native.glob(["**/*.py"]),
        visibility = VISIBILITY,
    )
