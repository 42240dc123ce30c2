"""Programs that are given what a manifest's artifacts are made from now, without building the executables."""

load("//rules:providers.bzl", "AotExecutableInfo", "AotExportInfo", "PythonSourcesInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:launcher.bzl", "environment_files", "examined_rows", "packages_word", "plugin_words", "plugins_of", "refused_elsewhere", "shell_quote", "stagec_program")

_CURRENT_INPUTS = {
    "bundle": attr.string(doc = "The manifest's name.", mandatory = True),
    "version": attr.string(doc = "The manifest's version.", mandatory = True),
    "exports": attr.label_list(doc = "The exported functions.", providers = [AotExportInfo]),
    "executables": attr.label_list(doc = "The executables.", providers = [AotExecutableInfo]),
    # A manifest on the command line is planned, which no action does.
    "_compiler": attr.label(default = Label("//compiler:sources"), providers = [PythonSourcesInfo]),
}

def _name_of(environment):
    """The name of an environment in the inputs: that of its repository."""
    return environment.site_packages.owner.workspace_name

def _program(ctx, command, before = "", extensions = []):
    """A program that runs a command of the compiler on the current inputs. before: bash that runs first.

    `{stagec}` in the command starts the compiler, `{inputs}` is the JSON that names the current inputs. It runs in the folder
    where the user is: there, paths on the command line are relative to that. Where it has `{plugins}`, options that say where
    plugins and other environments are, these are not on the path of the program, which does not compile. extensions: those
    that the command is in, as extension_of returns them.
    """
    stagec = ctx.toolchains[TOOLCHAIN_TYPE].stagec
    exports = [target[AotExportInfo] for target in ctx.attr.exports]
    executables = [target[AotExecutableInfo] for target in ctx.attr.executables]

    # All of them are of one package: the macro declares this.
    inputs = ctx.actions.declare_file(ctx.label.name + ".json")
    ctx.actions.write(inputs, json.encode({
        "format": 1,
        "kind": "inputs",
        "name": ctx.attr.bundle,
        "version": ctx.attr.version,
        "exports": {
            one.name: {
                "spec": one.spec.basename,
                "exported": one.exported.basename,
                "description": one.description.basename,
                "lowered": one.lowered.basename if one.lowered else "",
            }
            for one in exports
        },
        "executables": {
            one.name: dict(
                {"environment": _name_of(one.environment)} if one.environment else {},
                export = one.export,
                spec = one.spec.basename,
            )
            for one in executables
        },
    }) + "\n")

    # What is installed of a plugin is a component of its executables.
    plugins = plugins_of(exports, [one for one in executables if not one.environment])
    elsewhere = {}
    for one in executables:
        if one.environment:
            used_by = elsewhere.setdefault(_name_of(one.environment), struct(python = one.environment, packages = {}))
            used_by.packages.update({used.site_packages: used for used in (one.environment, one.plugin) if used})
    words = [plugin_words(plugins, ctx.workspace_name)]
    for name, one in elsewhere.items():
        path = ":".join([packages_word(used, ctx.workspace_name) for used in one.packages.values()])
        words.append("--environment %s:%s:%s" % (shell_quote(name), shell_quote(one.python.interpreter), path))
    named = "\"$workspace\"/" + shell_quote(inputs.short_path)
    line = command.replace("{inputs}", named).replace("{plugins}", " ".join(words))
    body = before + "cd \"${BUILD_WORKING_DIRECTORY:-.}\"\nexec " + line + "\n"
    extensions = extensions + [one.extension for one in exports if one.extension][:1]
    path = [] if "{plugins}" in command else plugins.values()
    rows = examined_rows(exports, [stagec.environment] + path)
    files = [inputs] + [one.spec for one in executables]
    for one in exports:
        files += [one.spec, one.exported, one.description] + ([one.lowered] if one.lowered else [])
    files += environment_files(plugins.values() + [used for one in elsewhere.values() for used in one.packages.values()])
    compiler = ctx.attr._compiler[PythonSourcesInfo].sources
    return stagec_program(ctx, body, files, path, extensions = extensions, examined = rows, sources = [compiler])

def _aot_explanation_impl(ctx):
    return _program(ctx, "{stagec} explain {plugins} \"$@\" {inputs}")

aot_explanation = rule(
    implementation = _aot_explanation_impl,
    doc = "`bazel run <manifest>.explain -- OLD` compares an artifact with what Bazel would build now, and says what " +
          "differs. It traces functions that have changed, and compiles nothing. `aot_manifest` declares it.",
    executable = True,
    attrs = _CURRENT_INPUTS,
    toolchains = [str(TOOLCHAIN_TYPE)],
)

def _aot_autotuning_impl(ctx):
    root = "\"${BUILD_WORKSPACE_DIRECTORY:-.}\""
    return _program(
        ctx,
        "{stagec} autotune --root %s \"$@\" {inputs}" % root,
        refused_elsewhere(ctx, "the results"),
        [extension_of(ctx.attr._extension)],
    )

aot_autotuning = rule(
    implementation = _aot_autotuning_impl,
    doc = "`bazel run <manifest>.autotune`, on a machine with the NVIDIA devices of a manifest's targets, times kernels " +
          "on them and writes the files of results that the targets name into the source tree. The macro of a " +
          "manifest declares it where a target names such a file.",
    executable = True,
    attrs = dict(_CURRENT_INPUTS, _extension = extension_attr("insight")),
    toolchains = [str(TOOLCHAIN_TYPE)],
)
