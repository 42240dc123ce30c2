"""A program that tells how an artifact and the current inputs differ."""

load("//rules:providers.bzl", "AotExecutableInfo", "AotExportInfo", "PythonSourcesInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:launcher.bzl", "environment_files", "plugins_of", "shell_quote", "write_stagec_launcher")

def _aot_explanation_impl(ctx):
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
            }
            for one in exports
        },
        "executables": {one.name: {"export": one.export, "spec": one.spec.basename} for one in executables},
    }) + "\n")

    # What is installed of a plugin is a component of its executables.
    plugins = plugins_of(executables).values()

    # A path on the command line is relative to where the user is.
    body = "cd \"${{BUILD_WORKING_DIRECTORY:-.}}\"\nexec {stagec} explain \"$@\" \"$workspace\"/%s\n"
    script = write_stagec_launcher(ctx, stagec, body % shell_quote(inputs.short_path), plugins)
    files = [inputs] + [one.spec for one in executables]
    for one in exports:
        files += [one.spec, one.exported, one.description]
    return [DefaultInfo(
        executable = script,
        files = depset([script]),
        runfiles = ctx.runfiles(files = files, transitive_files = depset(
            environment_files(plugins),
            transitive = [stagec.inputs, ctx.attr._compiler[PythonSourcesInfo].sources],
        )),
    )]

aot_explanation = rule(
    implementation = _aot_explanation_impl,
    doc = "`bazel run <manifest>.explain -- OLD` tells how what an artifact was made from and what would be built now " +
          "differ. It traces what has changed, and compiles nothing. The macro of a manifest declares it.",
    executable = True,
    attrs = {
        "bundle": attr.string(doc = "The manifest's name.", mandatory = True),
        "version": attr.string(doc = "The manifest's version.", mandatory = True),
        "exports": attr.label_list(doc = "The exported functions.", providers = [AotExportInfo]),
        "executables": attr.label_list(doc = "The executables.", providers = [AotExecutableInfo]),
        # A manifest on the command line is planned, which no action does.
        "_compiler": attr.label(default = Label("//compiler:sources"), providers = [PythonSourcesInfo]),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
