"""A bundle as an image of a registry, and the program that pushes it."""

load("//rules:providers.bzl", "AotBundleInfo", "AotJaxCacheInfo", "AotProvenanceInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:launcher.bzl", "shell_quote", "stagec_program")

def _beside(bundle):
    """The files of weights beside a bundle, by their names in it."""
    folder = bundle.bundle.short_path.rpartition("/")[0]
    return {file.short_path[len(folder) + 1 if folder else 0:]: file for file in bundle.weights}

def _caches(ctx):
    """The layer with JAX's compilation cache, if there is one."""
    return [ctx.attr.jax_cache[AotJaxCacheInfo].layer] if ctx.attr.jax_cache else []

def _aot_image_impl(ctx):
    bundle, provenance = ctx.attr.bundle[AotBundleInfo], ctx.attr.provenance[AotProvenanceInfo]
    caches = _caches(ctx)
    folder = ctx.actions.declare_directory(ctx.label.name)
    arguments = ctx.actions.args()
    arguments.add(bundle.bundle)
    arguments.add("--output", folder.path)
    arguments.add("--statement", provenance.statement)
    arguments.add("--sbom", provenance.sbom)
    for name, file in _beside(bundle).items():
        arguments.add("--weights-file", "%s=%s" % (name, file.path))
    arguments.add_all(caches, before_each = "--jax-cache")
    if ctx.attr.container:
        arguments.add("--container")
    compiler_action(
        ctx,
        mnemonic = "StagecImage",
        progress_message = "Writing the image of %s" % bundle.name,
        command = "image",
        arguments = arguments,
        inputs = depset([bundle.bundle, provenance.statement, provenance.sbom] + bundle.weights + caches),
        outputs = [folder],
        worker = False,
        extension = extension_of(ctx.attr._extension),
    )
    return [DefaultInfo(files = depset([folder]), runfiles = ctx.runfiles([folder]))]

_ATTRS = {
    "bundle": attr.label(doc = "The bundle.", mandatory = True, providers = [AotBundleInfo]),
    "provenance": attr.label(doc = "The bundle's provenance.", mandatory = True, providers = [AotProvenanceInfo]),
    "jax_cache": attr.label(doc = "JAX's compilation cache of the manifest, if any.", providers = [AotJaxCacheInfo]),
    "_extension": extension_attr("registry"),
}

aot_image = rule(
    implementation = _aot_image_impl,
    doc = "Writes the bundle as an OCI image layout, the folder `<name>`: a layer for the bundle and one for each file of " +
          "weights beside it, and for JAX's compilation cache if there is one; statement and SBOM refer to the image. docs/registries.md has the details. `aot_manifest` " +
          "declares two: `<manifest>.image` is an artifact of ModelPack, and `<manifest>.container` a container image.",
    attrs = dict(
        _ATTRS,
        container = attr.bool(doc = "Whether it is a container image, which every container runtime mounts, with the files below `/models`."),
    ),
    toolchains = [str(TOOLCHAIN_TYPE)],
)

# The image is made of the files where they are: nothing is copied before the registry has asked for it.
_BODY = """files=({files})
cd "${{BUILD_WORKING_DIRECTORY:-.}}"
exec {{stagec}} push "$workspace"/{bundle} "${{files[@]}}" "$@"
"""

def _aot_push_impl(ctx):
    bundle, provenance = ctx.attr.bundle[AotBundleInfo], ctx.attr.provenance[AotProvenanceInfo]
    files = [
        "--statement \"$workspace\"/" + shell_quote(provenance.statement.short_path),
        "--sbom \"$workspace\"/" + shell_quote(provenance.sbom.short_path),
    ] + [
        "--weights-file %s\"$workspace\"/%s" % (shell_quote(name + "="), shell_quote(file.short_path))
        for name, file in _beside(bundle).items()
    ] + ["--jax-cache \"$workspace\"/" + shell_quote(file.short_path) for file in _caches(ctx)]
    body = _BODY.format(files = " ".join(files), bundle = shell_quote(bundle.bundle.short_path))
    inputs = [bundle.bundle, provenance.statement, provenance.sbom] + bundle.weights + _caches(ctx)
    return stagec_program(ctx, body, inputs, extensions = [extension_of(ctx.attr._extension)])

aot_push = rule(
    implementation = _aot_push_impl,
    doc = "`bazel run <manifest>.push -- registry/repository:tag` copies the image to a registry, with skopeo, which is " +
          "on your machine and has your credentials. `--container` makes it a container image, and `--signature FILE` adds a signature. No action sees a credential. " +
          "`aot_manifest` declares it.",
    executable = True,
    attrs = _ATTRS,
    toolchains = [str(TOOLCHAIN_TYPE)],
)
