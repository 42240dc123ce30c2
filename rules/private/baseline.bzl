"""What the executables of a manifest took when somebody accepted it, and a test that they do not take more."""

load("//rules:providers.bzl", "AotBundleInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:launcher.bzl", "label_of", "refused_elsewhere", "shell_quote", "stagec_program")

def _path_in_workspace(ctx):
    """The baseline's path, relative to the workspace."""
    return (ctx.label.package + "/" if ctx.label.package else "") + ctx.attr.file

def _launcher(ctx, words, files, before = ""):
    """A program that runs `stagec baseline` on the bundle and the inventories of its executables. before: bash."""
    info = ctx.attr.bundle[AotBundleInfo]
    inventories = [one.inventory for one in info.executables.to_list()]
    arguments = ctx.actions.declare_file(ctx.label.name + ".arguments")
    ctx.actions.write(arguments, "".join(["--inventory=%s\n" % one.short_path for one in inventories]))

    # Arguments name files by their paths in the runfiles.
    body = "cd \"$workspace\"\nexec {stagec} baseline ./%s %s @%s \"$@\"\n" % (
        shell_quote(info.bundle.short_path),
        words,
        shell_quote(arguments.short_path),
    )
    return stagec_program(ctx, before + body, [info.bundle, arguments] + inventories + files)

def _aot_baseline_update_impl(ctx):
    # The user's workspace: the program writes beside the manifest.
    path = "\"${BUILD_WORKSPACE_DIRECTORY:-$PWD}\"/" + shell_quote(_path_in_workspace(ctx))
    return _launcher(ctx, "%s --update" % path, [], refused_elsewhere(ctx, "the baseline"))

def _aot_baseline_test_impl(ctx):
    accept = "bazel run " + label_of(ctx.label).replace(".baseline_test", ".update_baseline")
    baseline = ctx.file.baseline
    words = [
        shell_quote("./" + (baseline.short_path if baseline else _path_in_workspace(ctx))),
        "--tolerances",
        shell_quote(ctx.attr.tolerances),
        "--accept",
        shell_quote(accept),
        shell_quote("--display-path=" + _path_in_workspace(ctx)),
    ]
    return _launcher(ctx, " ".join(words), [baseline] if baseline else [])

_BUNDLE = attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo])

aot_baseline_update = rule(
    implementation = _aot_baseline_update_impl,
    doc = "`bazel run <manifest>.update_baseline` writes `<manifest>.baseline.json` beside the manifest: what each " +
          "executable takes now. `aot_manifest` declares it.",
    executable = True,
    attrs = {
        "bundle": _BUNDLE,
        "file": attr.string(doc = "The baseline's path, relative to the package.", mandatory = True),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)

aot_baseline_test = rule(
    implementation = _aot_baseline_test_impl,
    doc = "Compares what each executable of a bundle takes with the manifest's baseline, and fails where one has grown " +
          "beyond its tolerance. `aot_manifest` declares one where the baseline is there, or a function has tolerances.",
    test = True,
    attrs = {
        "bundle": _BUNDLE,
        "baseline": attr.label(doc = "The baseline; none where it is missing.", allow_single_file = [".json"]),
        "file": attr.string(doc = "The baseline's path, relative to the package.", mandatory = True),
        "tolerances": attr.string(doc = "JSON: function, metric and by how much it may grow.", default = "{}"),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
