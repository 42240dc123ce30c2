"""The staging toolchain: the interpreter, its packages and the compiler that the actions run."""

load("//rules:providers.bzl", "InterpreterInfo", "IsolationInfo", "PythonEnvironmentInfo", "PythonSourcesInfo", "StagecToolchainInfo")
load("//rules/private:platforms.bzl", "ENVIRONMENT")
load("//rules/private:python_environment.bzl", "INTERPRETER_FLAGS")

TOOLCHAIN_TYPE = Label("//rules:toolchain_type")

def toolchain_info(ctx, interpreter = None, packages_are_inputs = True, workers = False):
    """What actions run.

    Args:
      ctx: the context of a rule with the attributes `environment`, `compiler`, `entry` and `_start` of stagec_toolchain.
      interpreter: InterpreterInfo of what runs instead of the environment's interpreter, or None.
      packages_are_inputs: as stagec_toolchain has it.
      workers: whether Bazel may keep workers.

    Returns:
      StagecToolchainInfo.
    """
    environment = ctx.attr.environment[PythonEnvironmentInfo]
    entry = ctx.file.entry
    package_folder = entry.dirname
    sources = depset(
        [entry, ctx.file._start],
        transitive = [ctx.attr.compiler[PythonSourcesInfo].sources] + ([interpreter.files] if interpreter else []),
    )
    return StagecToolchainInfo(
        environment = environment,
        interpreter = interpreter,
        entry = entry,
        start = ctx.file._start,
        import_root = package_folder.rpartition("/")[0] or ".",
        inputs = depset([environment.site_packages, environment.fingerprint], transitive = [sources]),
        sources = sources,
        packages_are_inputs = packages_are_inputs,
        environment_tool = ctx.attr.environment[DefaultInfo].files_to_run,
        tools = [target[DefaultInfo].files_to_run for target in (ctx.attr.compiler, ctx.attr._start)],
        workers = workers,
    )

def _stagec_toolchain_impl(ctx):
    return [platform_common.ToolchainInfo(stagec = toolchain_info(
        ctx,
        interpreter = ctx.attr.interpreter[InterpreterInfo] if ctx.attr.interpreter else None,
        packages_are_inputs = ctx.attr.packages_are_inputs,
        workers = ctx.attr.isolation[IsolationInfo].works,
    ))]

stagec_toolchain = rule(
    implementation = _stagec_toolchain_impl,
    doc = "Declares the compiler that builds functions. Register it with a `toolchain` of type `//rules:toolchain_type`.",
    attrs = {
        "environment": attr.label(
            doc = "The Python environment with jax, jaxlib, and the other packages that the compiler and the models import.",
            mandatory = True,
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        "interpreter": attr.label(
            doc = "A `python_interpreter` that actions run instead of the environment's interpreter. It must have " +
                  "the same ABI, such as CPython 3.11: the packages were installed for that.",
            providers = [InterpreterInfo],
            cfg = "exec",
        ),
        "compiler": attr.label(
            doc = "The compiler's sources, all of them in `srcs`: if one changes, Bazel starts new workers.",
            mandatory = True,
            providers = [PythonSourcesInfo],
            cfg = "exec",
        ),
        "isolation": attr.label(
            doc = "Whether workers can isolate their actions here. Where they cannot, Bazel keeps none.",
            default = Label("@stagec_isolation//:isolation"),
            providers = [IsolationInfo],
            cfg = "exec",
        ),
        "packages_are_inputs": attr.bool(
            doc = "Whether the installed packages are inputs of the actions. If not, an action finds them where they are " +
                  "installed on this machine, and their fingerprint stands for them in its key: builds with a cache are " +
                  "faster, but actions cannot run on other machines.",
            default = True,
        ),
        "entry": attr.label(
            doc = "The compiler's __main__.py, in the folder of its package.",
            mandatory = True,
            allow_single_file = [".py"],
            cfg = "exec",
        ),
        # Not in the command line: Bazel shows that where an action fails, and a text in it looks like the reason.
        "_start": attr.label(default = Label("//rules/private:start.sh"), allow_single_file = True, cfg = "exec"),
    },
)

_WORKER = {
    "requires-worker-protocol": "proto",
    "supports-worker-cancellation": "1",
    "supports-workers": "1",
}

def examined_by(spec):
    """Whose examination lets an action change a compiler's code.

    Args:
      spec: string, the spec of a function or an executable.

    Returns:
      string: `examined` of its manifest, which is "here", "project" or "none".
    """
    described = json.decode(spec)
    return described.get("target", described.get("computed_on", {})).get("examined", "here")

def compiler_action(
        ctx,
        mnemonic,
        progress_message,
        command,
        arguments,
        inputs,
        outputs,
        plugin = None,
        sources = None,
        looked = None,
        worker = True,
        sandbox = True,
        environment = None,
        extension = None,
        examined = "",
        follows_cpu = False,
        toolchain = None):
    """Runs one command of the compiler: in a worker that Bazel keeps, or in a new process where it keeps none.

    Args:
      ctx: the rule's context; the rule asks for TOOLCHAIN_TYPE, or gives `toolchain`.
      mnemonic: the action's mnemonic.
      progress_message: what Bazel shows while it runs.
      command: the compiler's command: "action compile", or one that people run too, such as "image".
      arguments: Args that follow it. They go through a file, and are what a worker gets with each request. A word of them
        that begins with @ would be another such file, to Bazel and to the command. So a label, and a path that a user may
        have chosen, are in one word with their option.
      inputs: depset of File that the command reads.
      outputs: list of File that it writes.
      plugin: PythonEnvironmentInfo of packages that the command needs besides the toolchain's, or None.
      sources: depset of File that a model may import and read, for commands that run one; or None. If one of them is
        edited that this run did not read, Bazel does not run the action again: what it has not read is one more output.
        Only what such a command writes depends on the release of Python.
      looked: what AotExportInfo has, for a depset `sources`: so another file in that runs the action again only if the
        command may look for it. None: every other file does.
      worker: whether it may run in a worker, which copies files, and no folders.
      sandbox: whether a sandbox hides what is not an input. To make and remove a sandbox takes longer
        than a command that runs no code of a model, and opens what its arguments name.
      environment: Target with PythonEnvironmentInfo, from an attribute with cfg = "exec": the environment that runs the
        command instead of the toolchain's, with its interpreter, emulator, packages and workers of its own. Nothing
        of the toolchain's environment is in the action's key then. None: the toolchain's.
      extension: the extension that has the command, or the function's frontend, as extension_of returns it; None: the
        compiler has it. An edit in an extension runs no action without it again.
      examined: of an action that compiles or traces, what `examined_by` returns. With "here", the rows of libraries that
        stagec does not know are inputs. With "none", it follows the CPU.
      follows_cpu: whether the result follows the CPU of the machine that builds: no key has that, so no other machine gets
        the result from a cache.
      toolchain: StagecToolchainInfo; None: that of TOOLCHAIN_TYPE.
    """
    stagec = toolchain or ctx.toolchains[TOOLCHAIN_TYPE].stagec
    python = environment[PythonEnvironmentInfo] if environment else stagec.environment
    executable, version = python.execution_interpreter, python.execution_version
    if stagec.interpreter and not environment:
        executable, version = stagec.interpreter.executable, stagec.interpreter.version or python.version
    if python.emulated:
        executable, version = python.emulated.executable, python.emulated.version
        inputs = depset(transitive = [inputs, python.emulated.files])
        worker = False  # the kernel gives no namespaces to a process of several threads, which an emulator is
    start = ctx.actions.args()
    if type(executable) == type(""):
        start.add_all([stagec.start, executable])
        executable = "/bin/sh"
    start.add_all(INTERPRETER_FLAGS + [stagec.entry] + command.split(" "))
    env = {"STAGEC_PYTHON_ABI": python.abi}
    if sources != None:
        env["STAGEC_PYTHON_VERSION"] = version
    unread = None
    if sources:
        if looked:
            # The names are an input, which the command calls unread where it looked only for what is in the imports.
            arguments.add("--names", looked.names)
            arguments.add("--imports", looked.imports)
            inputs = depset([looked.names, looked.imports], transitive = [inputs])
        else:
            # The names are in the action's key. So where a file is added or removed, Bazel runs the action again.
            arguments.add_all(sources, format_each = "--source=%s")
        unread = ctx.actions.declare_file(outputs[0].basename + ".unread", sibling = outputs[0])
        arguments.add("--unread", unread)
        outputs = outputs + [unread]
        inputs = depset(transitive = [inputs, sources])
    if worker:
        arguments.add_all(outputs, before_each = "--declared")  # a worker takes these from the action, and nothing else
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    environments = [python] + ([plugin] if plugin else [])
    packages = [one.site_packages for one in environments]
    python_path = [folder.path for folder in packages]
    if python.execution_packages:
        packages = packages[1:]
        python_path[0] = python.execution_packages + "/site-packages"
        env["STAGEC_FINGERPRINT"] = python.fingerprint.path
    rows = [row for one in environments for row in one.examined] if examined == "here" else []
    python_path += [row.dirname for row in rows]

    # An action counts as one core, and may use all. XLA compiles most of a large function in a pool of threads: alone, it
    # takes the free cores, and of many actions Bazel starts one for each core. Bound to a core each, they would leave cores
    # idle at the end of a build.
    requirements = {"block-network": "1"}
    if follows_cpu or examined == "none":
        requirements["no-cache"] = "1"
    if not sandbox:
        requirements["no-sandbox"] = "1"
    if stagec.workers and worker:
        requirements.update(_WORKER)
    ctx.actions.run(
        mnemonic = mnemonic,
        progress_message = progress_message,
        executable = executable,
        arguments = [start, arguments],
        inputs = depset(
            (packages if stagec.packages_are_inputs else []) + [one.fingerprint for one in environments] + rows,
            transitive = [inputs, stagec.sources] + ([extension.sources] if extension else []),
        ),
        outputs = outputs,
        unused_inputs_list = unread,
        tools = stagec.tools + rows + [environment[DefaultInfo].files_to_run if environment else stagec.environment_tool] +
                ([extension.tool] if extension else []),
        env = dict(dict(env, **ENVIRONMENT), **{
            "LC_ALL": "C.UTF-8",
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": ":".join(python_path + [stagec.import_root] + ([extension.path] if extension else [])),
            "TZ": "UTC",
        }),
        execution_requirements = requirements,
    )
