"""The programs of a rehearsal, built for JAX's compilation cache."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:extensions.bzl", "extension_attr", "extension_of")
load("//rules/private:jax_cache.bzl", "jax_cache_entry", "jax_cache_folder")
load("//rules/private:launcher.bzl", "label_of")
load("//rules/private:platforms.bzl", "AMD_DEVICES", "PLUGINS")
load("//rules/private:provenance.bzl", "aot_provenance")
load("//rules/private:reproducibility_test.bzl", "aot_reproducibility_test")
load("//rules/private:signing.bzl", "aot_signing")

_CACHE = ".jax_cache"

def _platform(target):
    """Returns what the targets of a rehearsal are for; a slice of TPUs is a generation and its chips, as "v5e:2x4"."""
    if "_" in target or "=" in target:
        fail('targets: "%s" is not the name of a device or slice; write a slice of TPUs as "v5e:2x4"' % target)
    if target in AMD_DEVICES:
        return "rocm"
    return "cpu" if target.startswith("cpu") else "tpu" if ":" in target else "cuda"

def _file_name(target):
    return target.replace(":", "-")

def _spec(ctx, target):
    """Declares the spec with which to compile for a target, after a look at all keys."""
    spec = ctx.actions.declare_file("%s.%s.spec.json" % (ctx.label.name, _file_name(target)))
    arguments = ctx.actions.args()
    arguments.add("--label=" + label_of(ctx.label))
    arguments.add("--programs", ctx.file.programs)
    arguments.add("--target=" + target)
    arguments.add_all(ctx.files.keys, before_each = "--key")
    arguments.add("--output", spec)
    compiler_action(
        ctx,
        mnemonic = "StagecProgramSpec",
        progress_message = "Checking the keys of %s for %s" % (label_of(ctx.label), target),
        command = "action program-spec",
        arguments = arguments,
        inputs = depset([ctx.file.programs] + ctx.files.keys + ctx.files._targets),
        outputs = [spec],
        extension = extension_of(ctx.attr._rehearse),
        worker = False,
    )
    return spec

def _report(ctx, entries):
    """Declares the page about what was built. entries: pairs of a target and what `jax_cache_entry` returns."""
    page = ctx.actions.declare_file(ctx.label.name[:-len(_CACHE)] + ".report.html")
    arguments = ctx.actions.args()
    arguments.add("--programs", ctx.file.programs)
    arguments.add("--output", page)
    for target, one in entries:
        arguments.add("--costs=%s:%s:%s" % (_digest(one.key), one.costs.path, target))
    compiler_action(
        ctx,
        mnemonic = "StagecProgramReport",
        progress_message = "Reporting on %s" % label_of(ctx.label),
        command = "action program-report",
        arguments = arguments,
        inputs = depset([ctx.file.programs] + [one.costs for _, one in entries]),
        outputs = [page],
        extension = extension_of(ctx.attr._rehearse),
        worker = False,
    )
    return page

def _digest(key):
    return key.basename[:-len(".key")]

def _aot_programs_impl(ctx):
    plugin = ctx.attr.plugin[PythonEnvironmentInfo] if ctx.attr.plugin else None
    entries = []
    for target in ctx.attr.targets:
        spec = _spec(ctx, target)
        for key in ctx.files.keys:
            program = struct(
                name = "%s.%s" % (_file_name(target), _digest(key)),
                spec = spec,
                platform = _platform(target),
                plugin = plugin,
                examined = "here",
            )

            # One process compiles hundreds of small programs, one after the other. To start takes it as long as to compile some:
            # 356 programs for a CPU take 0.54 of the time, and 32 for an NVIDIA device a third. Their bytes are the same.
            series = "%s %s" % (label_of(ctx.label), target)
            entries.append((target, jax_cache_entry(ctx, program, key, series = series, has_costs = True)))
    groups = {"report": depset([_report(ctx, entries)])}
    return jax_cache_folder(ctx, ctx.file.programs.short_path, [one for _, one in entries], groups)

_aot_programs = rule(
    implementation = _aot_programs_impl,
    doc = "Writes the folder `<name>`, which a JAX program uses as its persistent compilation cache: all that it compiled in a " +
          "rehearsal. XLA compiles each program to the same bytes in each build (StagecJaxCompile). The output group `layer` " +
          "is the folder as `<name>.tar`, a layer of an image, and `report` a page about the programs. docs/rehearse.md has the details.",
    attrs = {
        "programs": attr.label(
            doc = "The programs.toml that `stagec rehearse` wrote.",
            mandatory = True,
            allow_single_file = [".toml"],
        ),
        "keys": attr.label_list(doc = "The files of its folder `programs`.", mandatory = True, allow_files = [".key"]),
        "targets": attr.string_list(
            doc = "The targets of the rehearsal's device, as in `stagec targets`.",
            mandatory = True,
            allow_empty = False,
        ),
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

def aot_programs(name, programs, targets, **kwargs):
    """Builds what a program compiled in a rehearsal, as JAX's persistent compilation cache.

    `<name>.jax_cache` is the folder; its output group `layer` is the same as `<name>.jax_cache.tar`, a layer of an image.
    `<name>.provenance` is statement and SBOM of the layer, `<name>.sign` signs it, and `<name>.reproducibility_test` builds
    all programs twice again. `<name>.report` is `<name>.report.html`, a page that needs no network: what each program takes.

    Args:
      name: string, what the names of the targets begin with.
      programs: string, the path of the programs.toml that `stagec rehearse` wrote; the folder `programs` is beside it.
      targets: list of string, what to build for, as in `stagec targets`: several for CPUs, or the GPU, or the slice of TPUs.
      **kwargs: attributes that all rules have, such as `visibility` and `tags`.
    """
    folder = programs.rpartition("/")[0]
    keys = native.glob([(folder + "/" if folder else "") + "programs/*.key"])
    if not keys:
        fail("aot_programs %s: there are no keys in %s/programs: rehearse the program first (docs/rehearse.md)" % (name, folder))
    plugins = [PLUGINS[_platform(target)] for target in targets if _platform(target) != "cpu"]
    cache = name + _CACHE
    tags = kwargs.pop("tags", [])
    _aot_programs(
        name = cache,
        programs = programs,
        keys = keys,
        targets = targets,
        plugin = (plugins + [None])[0],
        tags = tags,
        **kwargs
    )
    aot_provenance(
        name = name + ".provenance",
        bundle = ":" + cache,
        manifest = programs,
        manifest_path = native.package_name() + "/" + programs,
        tags = tags,
        **kwargs
    )

    # Nobody reads it after each build of //...
    native.filegroup(name = name + ".report", srcs = [":" + cache], output_group = "report", tags = tags + ["manual"], **kwargs)
    aot_signing(name = name + ".sign", provenance = ":" + name + ".provenance", tags = tags + ["manual"], **kwargs)
    aot_reproducibility_test(
        name = name + ".reproducibility_test",
        jax_cache = ":" + cache,
        tags = tags + ["reproducibility"],
        **kwargs
    )
