"""The programs of a rehearsal, built for JAX's compilation cache."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:jax_cache.bzl", "jax_cache_entry", "jax_cache_folder")
load("//rules/private:launcher.bzl", "label_of")
load("//rules/private:platforms.bzl", "PLUGINS")

def _aot_programs_impl(ctx):
    spec = ctx.actions.declare_file(ctx.label.name + ".spec.json")
    arguments = ctx.actions.args()
    arguments.add("--label=" + label_of(ctx.label))
    arguments.add("--programs", ctx.file.programs)
    arguments.add("--target=" + ctx.attr.target)
    arguments.add_all(ctx.files.keys, before_each = "--key")
    arguments.add("--output", spec)
    compiler_action(
        ctx,
        mnemonic = "StagecProgramSpec",
        progress_message = "Checking the keys of %s" % label_of(ctx.label),
        command = "action program-spec",
        arguments = arguments,
        inputs = depset([ctx.file.programs] + ctx.files.keys + ctx.files._targets),
        outputs = [spec],
        extension = extension_of(ctx.attr._rehearse),
        worker = False,
    )
    plugin = ctx.attr.plugin[PythonEnvironmentInfo] if ctx.attr.plugin else None
    entries = [
        jax_cache_entry(ctx, struct(name = key.basename[:-len(".key")], spec = spec, plugin = plugin), key)
        for key in ctx.files.keys
    ]
    return jax_cache_folder(ctx, ctx.file.programs.short_path, entries)

_aot_programs = rule(
    implementation = _aot_programs_impl,
    doc = "Writes the folder `<name>`, which a JAX program uses as its persistent compilation cache: all that it compiled in a " +
          "rehearsal. XLA compiles each program to the same bytes in each build (StagecJaxCompile). The output group `layer` " +
          "is the folder as `<name>.tar`, a layer of an image. docs/rehearse.md has the details.",
    attrs = {
        "programs": attr.label(
            doc = "The programs.toml that `stagec rehearse` wrote.",
            mandatory = True,
            allow_single_file = [".toml"],
        ),
        "keys": attr.label_list(doc = "The files of its folder `programs`.", mandatory = True, allow_files = [".key"]),
        "target": attr.string(doc = "The target of the rehearsal, as in `stagec targets`.", mandatory = True),
        "plugin": attr.label(
            doc = "The environment with XLA's plugin for the target's platform.",
            providers = [PythonEnvironmentInfo],
            cfg = "exec",
        ),
        "_rehearse": extension_attr("rehearse"),
        "_targets": attr.label(default = Label("//compiler:targets"), allow_files = True),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)

def aot_programs(name, programs, target, **kwargs):
    """Builds what a program compiled in a rehearsal, as JAX's persistent compilation cache.

    Args:
      name: string, a name of the folder.
      programs: string, the path of the programs.toml that `stagec rehearse` wrote; the folder `programs` is beside it.
      target: string, the target of the rehearsal, as in `stagec targets`.
      **kwargs: attributes that all rules have, such as `visibility` and `tags`.
    """
    folder = programs.rpartition("/")[0]
    keys = native.glob([(folder + "/" if folder else "") + "programs/*.key"])
    if not keys:
        fail("aot_programs %s: there are no keys in %s/programs: rehearse the program first (docs/rehearse.md)" % (name, folder))
    _aot_programs(
        name = name,
        programs = programs,
        keys = keys,
        target = target,
        plugin = None if target.startswith("cpu") else PLUGINS["cuda"],
        **kwargs
    )
