"""What a bundle, or a layer with JAX's compilation cache, was built from: an in-toto statement with SLSA provenance, and a CycloneDX SBOM."""

load("//rules:providers.bzl", "AotBundleInfo", "AotJaxCacheInfo", "AotProvenanceInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:launcher.bzl", "examined_rows")

def _source_word(file):
    """The word that names a source: its path in the workspace, and where the action finds it."""
    path = file.short_path
    return "--source=%s:%s" % ("external/" + path[len("../"):] if path.startswith("../") else path, file.path)

def _subject(target):
    """What a statement is about, and what that was built from."""
    if AotBundleInfo in target:
        info = target[AotBundleInfo]
        return struct(
            name = info.name,
            option = "--bundle",
            file = info.bundle,
            exports = info.exports.to_list(),
            executables = info.executables.to_list(),
            sources = info.arrays,
        )
    info = target[AotJaxCacheInfo]
    specs = {one.spec: one.plugin for one in info.entries}  # one for a target
    return struct(
        name = info.folder.basename,
        option = "--layer",
        file = info.layer,
        exports = [],
        executables = [struct(name = spec.basename[:-len(".spec.json")], spec = spec, plugin = specs[spec], examined = "here") for spec in specs],
        sources = depset([one.key for one in info.entries]),
    )

def _aot_provenance_impl(ctx):
    info = _subject(ctx.attr.bundle)
    exports, executables = info.exports, info.executables
    statement = ctx.actions.declare_file(info.name + ".intoto.json")
    sbom = ctx.actions.declare_file(info.name + ".sbom.json")
    environments = [
        ctx.attr._planning[PythonEnvironmentInfo],
        ctx.toolchains[TOOLCHAIN_TYPE].stagec.environment,
    ] + [used for one in exports + executables for used in (getattr(one, "environment", None), one.plugin) if used]
    inputs = [info.file, ctx.file.manifest]
    sources = depset(transitive = [info.sources] + [export.sources for export in exports])

    arguments = ctx.actions.args()
    arguments.add(info.option, info.file)
    arguments.add("--output", statement)
    arguments.add("--sbom", sbom)
    arguments.add("--manifest=%s:%s" % (ctx.attr.manifest_path, ctx.file.manifest.path))
    lists = [one.packages for one in environments] + [one.emulated.packages for one in environments if one.emulated]
    for packages in {packages: None for packages in lists}:
        arguments.add("--packages", packages)
        inputs.append(packages)
    for row in examined_rows(exports + executables, environments):
        arguments.add("--examined", row)
        inputs.append(row)
    for one in exports + executables:
        arguments.add("--spec=%s:%s" % (one.name, one.spec.path))
        inputs.append(one.spec)
    arguments.add_all(sources, map_each = _source_word)
    compiler_action(
        ctx,
        mnemonic = "StagecProvenance",
        progress_message = "Writing the provenance of %s" % info.name,
        command = "action provenance",
        arguments = arguments,
        inputs = depset(inputs, transitive = [sources]),
        outputs = [statement, sbom],
        extension = ([one.extension for one in exports if one.extension] or [None])[0],  # its digest is in the statement
    )
    return [
        DefaultInfo(files = depset([statement, sbom])),
        AotProvenanceInfo(bundle = info.file, statement = statement, sbom = sbom),
    ]

aot_provenance = rule(
    implementation = _aot_provenance_impl,
    doc = "Writes `<bundle>.intoto.json`, an in-toto statement with SLSA provenance, and `<bundle>.sbom.json`, a " +
          "CycloneDX SBOM of the toolchain. docs/provenance.md says what is in them. `aot_manifest` and `aot_programs` declare it.",
    attrs = {
        "bundle": attr.label(
            doc = "The bundle, or what `aot_programs` built.",
            mandatory = True,
            providers = [[AotBundleInfo], [AotJaxCacheInfo]],
        ),
        "manifest": attr.label(doc = "The manifest, or the programs.toml.", mandatory = True, allow_single_file = [".toml"]),
        "manifest_path": attr.string(doc = "The manifest's path in its repository.", mandatory = True),
        "_planning": attr.label(default = Label("@stagec_planning//:environment"), cfg = "exec"),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
