"""Whether this machine's system lets a worker isolate its actions."""

load("//rules:providers.bzl", "IsolationInfo")
load("//rules/private:python_environment.bzl", "INTERPRETER_FLAGS", "watched_path")

_CHECK = "from stagec.worker import isolation; isolation.tell()"

_SAID_LESS = "no fault, and builds have the same bytes: without namespaces, as in most containers, stagec's workers " + \
             "keep actions apart by other means %s. docs/security.md has what that means"
_SAID = "this system does not let stagec's workers isolate actions (%s), so each action runs in a Bazel sandbox, " + \
        "without a worker: docs/security.md says what a system has to allow"

def _isolation_check_impl(repository_ctx):
    entry = watched_path(repository_ctx, repository_ctx.attr._entry)
    interpreter = repository_ctx.read(repository_ctx.attr._interpreter).strip()
    result = repository_ctx.execute(
        [interpreter] + INTERPRETER_FLAGS + ["-c", _CHECK],
        environment = {"PYTHONHOME": "", "PYTHONPATH": str(entry.dirname.dirname), "PYTHONSAFEPATH": "1"},
    )
    if result.return_code != 0:
        print(_SAID % (result.stderr.strip().split("\n")[-1] or "exit status %d" % result.return_code))
    elif result.stdout:
        print(_SAID_LESS % result.stdout.strip())
    repository_ctx.file("BUILD", """load("@stagec//rules/private:isolation.bzl", "isolation")

isolation(
    name = "isolation",
    works = %s,
    visibility = ["//visibility:public"],
)
""" % (result.return_code == 0), executable = False)

isolation_check = repository_rule(
    implementation = _isolation_check_impl,
    doc = "Finds out whether this system lets a worker isolate its actions, and says so where it does not. It is asked " +
          "again when Bazel's server is started.",
    attrs = {
        "_entry": attr.label(default = Label("//compiler:stagec/__main__.py")),
        "_interpreter": attr.label(default = Label("@stagec_python//:interpreter.txt")),
    },
    local = True,
)

def _isolation_impl(ctx):
    return [IsolationInfo(works = ctx.attr.works)]

isolation = rule(
    implementation = _isolation_impl,
    doc = "Says whether a worker can isolate its actions. isolation_check declares it in the repository that it makes.",
    attrs = {"works": attr.bool(doc = "Whether it can.", mandatory = True)},
)
