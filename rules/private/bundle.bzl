"""All artifacts of a manifest, in one file."""

load("//rules:providers.bzl", "AotBundleInfo", "AotExecutableInfo", "AotExportInfo", "AotGoldenInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")

# What is written for a reader, of exports and of executables; see aot_export and aot_executable.
_TEXTS = ["debug", "description", "hlo_after", "hlo_before", "hlo_proto", "inventory", "jaxpr", "ptx", "stablehlo", "timeline"]

def _gathered(targets, group):
    """One output group of all targets that have it."""
    groups = [target[OutputGroupInfo] for target in targets]
    return depset(transitive = [getattr(one, group) for one in groups if hasattr(one, group)])

WEIGHTS_ATTR = attr.label_keyed_string_dict(
    doc = "The safetensors files that functions bind arguments to, with their paths in the manifest.",
    allow_files = True,
)

def add_weights(ctx, arguments):
    """Adds the files of the attribute `weights` to a command.

    Args:
      ctx: the rule's context.
      arguments: Args of the command.

    Returns:
      list of File: what the command reads.
    """
    files = []
    for target, path in ctx.attr.weights.items():
        file = _one_file(ctx, target, path)
        arguments.add("--weights", "%s=%s" % (path, file.path))
        files.append(file)
    return files

def _one_file(ctx, target, path):
    """The file of a target of weights."""
    files = target.files.to_list()
    if len(files) != 1:
        fail("%s: weights: %s has %d files; name a target of one .safetensors file" % (ctx.label, path, len(files)))
    return files[0]

def _describe(ctx, file, path):
    """Declares the file that has what a bundle needs to know of weights beside it; it depends on them alone."""
    described = ctx.actions.declare_file("%s.weights/%s.json" % (ctx.label.name, path))
    arguments = ctx.actions.args()
    arguments.add(file, format = "./%s")
    arguments.add("--output", described)
    compiler_action(
        ctx,
        mnemonic = "StagecDescribeWeights",
        progress_message = "Reading the weights %s" % path,
        command = "action describe-weights",
        arguments = arguments,
        inputs = depset([file]),
        outputs = [described],
    )
    return described

def _put_beside(ctx, file, path, bundle):
    """The file of weights in the bundle's folder, where a loader looks for it: it may be there already."""
    if file.path == "%s/%s" % (bundle.dirname, path):
        return file
    link = ctx.actions.declare_file(path)
    ctx.actions.symlink(output = link, target_file = file)
    return link

def _aot_bundle_impl(ctx):
    name = ctx.label.name
    exports = [target[AotExportInfo] for target in ctx.attr.exports]
    executables = [target[AotExecutableInfo] for target in ctx.attr.executables]
    bundle = ctx.actions.declare_file(name + ".aot")
    profile = ctx.actions.declare_file(name + ".profile.json")

    arguments = ctx.actions.args()
    arguments.add("--name", name)
    arguments.add("--version", ctx.attr.version)
    arguments.add("--output", bundle)
    arguments.add("--profile", profile)
    for requirement in ctx.attr.serves:
        arguments.add("--serves", requirement)
    inputs = []
    for export in exports:
        files = [export.exported, export.spec, export.description]
        arguments.add("--export", ":".join([export.name] + [file.path for file in files]))
        inputs += files
    for executable in executables:
        files = [executable.executable, executable.description, executable.module]
        arguments.add("--executable", ":".join([executable.name] + [file.path for file in files]))
        inputs += files
    given = []
    for one in [target[AotGoldenInfo] for target in ctx.attr.golden]:
        arguments.add("--golden", "%s=%s" % (one.name, one.golden.path))
        inputs.append(one.golden)
        given += one.inputs
    weights = add_weights(ctx, arguments)
    inputs += weights
    beside = []
    for target, path in ctx.attr.external_weights.items():
        file = _one_file(ctx, target, path)
        described = _describe(ctx, file, path)
        arguments.add("--external-weights", "%s=%s" % (path, described.path))
        inputs.append(described)
        beside.append(_put_beside(ctx, file, path, bundle))
    compiler_action(
        ctx,
        mnemonic = "StagecBundle",
        progress_message = "Bundling %s" % name,
        command = "action bundle",
        arguments = arguments,
        inputs = depset(inputs),
        outputs = [bundle, profile],
    )
    return [
        DefaultInfo(files = depset([bundle] + beside), runfiles = ctx.runfiles([bundle] + beside)),
        OutputGroupInfo(
            profile = depset([profile] + [one.profile for one in exports + executables]),
            **{group: _gathered(ctx.attr.exports + ctx.attr.executables, group) for group in _TEXTS}
        ),
        AotBundleInfo(
            name = name,
            version = ctx.attr.version,
            bundle = bundle,
            exports = depset(exports),
            executables = depset(executables),
            arrays = depset(weights + given),
            weights = beside,
        ),
    ]

aot_bundle = rule(
    implementation = _aot_bundle_impl,
    doc = "Packs exported functions and executables into `<name>.aot`. `aot_manifest` declares it. Its output " +
          "groups are those of all its functions and executables; `profile` also has `<name>.profile.json`, the seconds " +
          "of bundling.",
    attrs = {
        "version": attr.string(doc = "The manifest's version.", mandatory = True),
        "serves": attr.string_list(
            doc = "Releases of jaxlib, as `jaxlib==0.12.0`: the action fails where one of them has no executable for a function " +
                  "and target.",
        ),
        "exports": attr.label_list(doc = "The exported functions.", providers = [AotExportInfo]),
        "executables": attr.label_list(doc = "The executables.", providers = [AotExecutableInfo]),
        "golden": attr.label_list(doc = "Golden inputs and outputs.", providers = [AotGoldenInfo]),
        "weights": WEIGHTS_ATTR,
        "external_weights": attr.label_keyed_string_dict(
            doc = "Files of weights that stay beside the bundle, with their paths in the manifest. They are put into " +
                  "its folder.",
            allow_files = True,
        ),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
