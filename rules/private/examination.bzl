"""The rows of libraries that stagec does not know: an action examines each, once for a wheel.

Only the environments with such a library have these targets (python_environment.bzl), and their row is an input of every
action that uses them. docs/install.md says what is examined.
"""

load("//rules:providers.bzl", "PythonEnvironmentInfo", "PythonSourcesInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action", "toolchain_info")

def _examine(ctx, platform, **given):
    # The file's name is the one that stagec looks for in the folders of PYTHONPATH.
    row = ctx.actions.declare_file(ctx.label.name + "/stagec_known_builds.json")
    arguments = ctx.actions.args()
    arguments.add("--platform", platform)
    arguments.add("--output", row)
    compiler_action(
        ctx,
        mnemonic = "StagecExamine",
        progress_message = "Examining what compiles for %s, a build that stagec does not know" % platform,
        command = "action examine",
        arguments = arguments,
        inputs = depset(ctx.files._targets),
        outputs = [row],
        worker = False,
        examined = "here",
        **given
    )
    return [DefaultInfo(files = depset([row]))]

def _examined_jaxlib_impl(ctx):
    return _examine(ctx, "cpu", toolchain = toolchain_info(ctx))

def _examined_plugin_impl(ctx):
    return _examine(
        ctx,
        ctx.attr.platform,
        plugin = ctx.attr.plugin[PythonEnvironmentInfo],
        environment = ctx.attr.environment,
    )

_TARGETS = {"_targets": attr.label(default = Label("//compiler:targets"))}

examined_jaxlib = rule(
    implementation = _examined_jaxlib_impl,
    doc = "Examines the jaxlib of an environment. It needs no toolchain: that has the environment with the row.",
    attrs = dict(
        _TARGETS,
        environment = attr.label(
            doc = "The environment, without the row.",
            mandatory = True,
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        compiler = attr.label(
            doc = "The compiler's sources.",
            default = Label("//compiler:actions"),
            providers = [PythonSourcesInfo],
            cfg = "exec",
        ),
        entry = attr.label(
            doc = "The compiler's __main__.py.",
            default = Label("//compiler:stagec/__main__.py"),
            allow_single_file = [".py"],
            cfg = "exec",
        ),
        _start = attr.label(default = Label("//rules/private:start.sh"), allow_single_file = True, cfg = "exec"),
    ),
)

examined_plugin = rule(
    implementation = _examined_plugin_impl,
    doc = "Examines the plugin of an environment, with the jaxlib that compiles with it.",
    toolchains = [str(TOOLCHAIN_TYPE)],
    attrs = dict(
        _TARGETS,
        platform = attr.string(doc = "The platform that it compiles for.", mandatory = True),
        plugin = attr.label(
            doc = "The environment of the plugin, without the row.",
            mandatory = True,
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        environment = attr.label(
            doc = "The environment of its jaxlib; none for that of the toolchain.",
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
    ),
)
