"""A manifest's plan as a repository, and the macro that declares the planned targets."""

load("//rules/private:baseline.bzl", "aot_baseline_test", "aot_baseline_update")
load("//rules/private:bundle.bzl", "aot_bundle")
load("//rules/private:crossing.bzl", "aot_crossing", "aot_results")
load("//rules/private:current_inputs.bzl", "aot_autotuning", "aot_explanation")
load("//rules/private:executable.bzl", "aot_executable")
load("//rules/private:export.bzl", "aot_export")
load("//rules/private:golden.bzl", "aot_golden", "aot_golden_optimized_test", "aot_golden_test")
load("//rules/private:imports.bzl", "aot_imports")
load("//rules/private:image.bzl", "aot_image", "aot_push")
load("//rules/private:jax_cache.bzl", "aot_jax_cache")
load("//rules/private:jaxlibs.bzl", "compiled_executables")
load("//rules/private:measuring.bzl", "aot_latency", "aot_size_test")
load("//rules/private:platforms.bzl", "PLANNING", "PLUGINS")
load("//rules/private:provenance.bzl", "aot_provenance")
load("//rules/private:python_environment.bzl", "INTERPRETER_FLAGS", "watched_path", "workspace_path")
load("//rules/private:report.bzl", "aot_report")
load("//rules/private:reproducibility_test.bzl", "aot_reproducibility_test")
load("//rules/private:serving.bzl", "aot_server")
load("//rules/private:signing.bzl", "aot_signing")

_DEFS = """\"\"\"The targets of {path}, as planned.\"\"\"

load("@stagec//rules/private:manifest.bzl", "declare_manifest")
load("@stagec_jaxlibs//:defs.bzl", "JAXLIBS")

_PLAN = {plan}

def aot_manifest(name, deps = [], data = [], function_deps = {{}}, imports = [], isolation = "manifest", **common):
    \"\"\"Declares every artifact of {path}.

    Args:
      name: the manifest's name, {name}. The bundle has this name too.
      deps: what functions import: python_library, py_library of any rule set, filegroup or .py files. After an edit,
        Bazel traces again only the functions that import or open the file.
      data: files that tracing reads.
      function_deps: what only some functions may import: `{{"predict": ["predict.py"]}}`. You seldom need it.
      imports: import roots besides the repositories' folders, relative to the package.
      isolation: "manifest": one process compiles several functions for a CPU, one after the other. "function": each has a
        process of its own, so nothing in one exported function can change the executable of another.
      **common: attributes of every target, such as visibility and tags.
    \"\"\"
    declare_manifest(_PLAN, JAXLIBS, Label("//:manifest.toml"), name, deps, data, function_deps, imports, isolation, common)
"""

# The `defs.bzl` of a manifest with mistakes. A repository rule that fails says them four times, and not which BUILD file
# asks.
_MISTAKES = """\"\"\"What is wrong with {path}.\"\"\"

_WHAT = {mistakes}

def aot_manifest(name, **attributes):
    \"\"\"Says it.

    Args:
      name: the manifest's name.
      **attributes: of its targets.
    \"\"\"
    fail(_WHAT)
"""

def _watch_beside(repository_ctx, manifest, file):
    """Has the repository made again when a file below the manifest's folder changes.

    It may be missing; returns whether the repository is made again when it is there.
    """
    folder = repository_ctx.path(manifest).dirname
    if hasattr(repository_ctx, "watch"):
        repository_ctx.watch("%s/%s" % (folder, file))
        return True
    if not repository_ctx.path("%s/%s" % (folder, file)).exists:
        return False
    name = manifest.name.rpartition("/")[0]
    repository_ctx.path(manifest.relative(":" + (name + "/" if name else "") + file))
    return True

def _stagec_manifest_impl(repository_ctx):
    for label in repository_ctx.attr._planner:
        watched_path(repository_ctx, label)
    entry = watched_path(repository_ctx, repository_ctx.attr._entry)
    compiler = entry.dirname.dirname
    interpreter = repository_ctx.read(repository_ctx.attr._interpreter).strip()
    packages = repository_ctx.path(repository_ctx.attr._interpreter).dirname.get_child("site-packages")
    manifest = repository_ctx.attr.manifest
    path = workspace_path(manifest)
    result = repository_ctx.execute(
        [interpreter] + INTERPRETER_FLAGS +
        [entry, "action", "plan", watched_path(repository_ctx, manifest)] +
        ["--display-path=" + path, "--output", "plan.json", "--target-files", "files.txt"],
        environment = {
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONHOME": "",
            "PYTHONPATH": "%s:%s" % (packages, compiler),
            "PYTHONSAFEPATH": "1",
        },
    )
    files = repository_ctx.read("files.txt").splitlines() if repository_ctx.path("files.txt").exists else []
    watched = all([_watch_beside(repository_ctx, manifest, file) for file in files])
    if result.return_code == 2 and watched:  # mistakes in files whose edits Bazel sees
        mistakes = repr("\n" + result.stderr.strip())
        repository_ctx.file("defs.bzl", _MISTAKES.format(path = path, mistakes = mistakes), executable = False)
        repository_ctx.file("BUILD", "exports_files([\"defs.bzl\"])\n", executable = False)
        return
    if result.return_code != 0:
        fail(result.stderr.strip())
    plan = json.decode(repository_ctx.read("plan.json"))
    data = {
        "path": path,
        "package": manifest.package,
        "folder": manifest.name.rpartition("/")[0],
        "bundle": (plan["bundle"]["name"], plan["bundle"]["version"]),
        "reproducible": plan["manifest"]["reproducible"],
        "bundle_size": plan["bundle_size"],
        "tolerances": plan["tolerances"],
        "jax_cache": plan["jax_cache"],
        "jaxlib": plan["jaxlib"],
        "serves": plan["serves"],
        "runs_on": plan["runs_on"],
        "exports": [
            (export["name"], export["spec"]["name"], json.encode(export["spec"]))
            for export in plan["exports"]
        ],
        "executables": [
            (executable["name"], executable["export"], json.encode(executable["spec"]))
            for executable in plan["executables"]
        ],
    }
    repository_ctx.file(
        "defs.bzl",
        _DEFS.format(path = path, name = repr(plan["bundle"]["name"]), plan = repr(data)),
        executable = False,
    )
    # The manifest is an input of the bundle's provenance. Its own package may not export it.
    repository_ctx.symlink(manifest, "manifest.toml")
    exported = ["defs.bzl", "manifest.toml", "plan.json"]
    repository_ctx.file("BUILD", "exports_files(%r)\n" % exported, executable = False)

stagec_manifest = repository_rule(
    implementation = _stagec_manifest_impl,
    doc = "Plans a manifest. `@<name>//:defs.bzl` then has the macro `aot_manifest`, which declares its targets.",
    attrs = {
        "manifest": attr.label(doc = "The manifest, a .toml file.", mandatory = True, allow_single_file = [".toml"]),
        "_entry": attr.label(default = Label("//compiler:stagec/__main__.py")),
        "_interpreter": attr.label(default = Label("@stagec_planning//:interpreter.txt")),
        "_planner": attr.label_list(
            default = [Label("//compiler:" + source) for source in PLANNING],
        ),
    },
)

def _tagged(common, *tags):
    """The common attributes, with more tags."""
    attributes = dict(common)
    attributes["tags"] = attributes.get("tags", []) + list(tags)
    return attributes

def _modules_of(spec):
    """The modules that a function's spec names; none where the function is a file."""
    named = [value for value in json.decode(spec).values() if type(value) == type("")]
    return [value.partition(":")[0] for value in named if ":" in value and "/" not in value and "?" not in value]

def _weights_of(specs, external):
    """The labels and paths of the files that functions are bound to: those beside the bundle, or those in it."""
    bound = [weights for spec in specs for weights in json.decode(spec)["bind"].values()]
    return {":" + one["file"]: one["file"] for one in bound if one["external"] == external}

def _declare_baseline(plan, name, common):
    """The program that writes the manifest's baseline, and the test against it where there is one or it is expected."""

    # Beside the manifest, or beside the BUILD file where the manifest is another package's.
    folder = plan["folder"] if plan["package"] == native.package_name() else ""
    path = (folder + "/" if folder else "") + name + ".baseline.json"
    update = name + ".update_baseline"
    aot_baseline_update(name = update, bundle = ":" + name, file = path, **common)
    baselines = native.glob([path], allow_empty = True)
    if baselines or plan["tolerances"]:
        aot_baseline_test(
            name = name + ".baseline_test",
            bundle = ":" + name,
            baseline = baselines[0] if baselines else None,
            file = path,
            tolerances = json.encode(plan["tolerances"]),
            **common
        )

def _declare_golden_tests(name, compiled, common):
    """A test for each platform and environment. compiled: the executables of functions with golden inputs."""
    for one in {(one.platform, one.suffix): one for one in compiled}.values():
        which = "" if one.platform == "cpu" else one.platform + "_"

        # An accelerator is one process's at a time, and its plugin is nothing that //... should fetch.
        attributes = common if one.platform == "cpu" else _tagged(common, "manual", "exclusive", "no-sandbox")
        aot_golden_test(
            name = "%s.golden_%stest%s" % (name, which, one.suffix),
            bundle = ":" + name,
            platform = one.platform,
            plugin = one.plugin,
            environment = one.environment,
            **attributes
        )

def _declare_optimized_tests(name, compiled, common):
    """A test for each platform of devices whose decided programs are run. compiled: the executables of those functions."""
    platforms = {}
    for one in compiled:
        if one.platform != "cpu":
            platforms.setdefault(one.platform, []).append(one)
    for platform, executables in platforms.items():
        functions = {one.export[len(name) + 1:]: None for one in executables}
        aot_golden_optimized_test(
            name = name + ".golden_%s_optimized_test" % platform,
            bundle = ":" + name,
            executables = [":" + one.name for one in executables] if platform == "tpu" else [],
            functions = functions.keys(),
            platform = platform,
            **common
        )

def _declare_jax_cache(plan, name, common):
    """The folder of JAX's compilation cache, where the manifest asks for it."""
    cached = plan["jax_cache"]["executables"]
    if not cached:
        return
    machines = {}
    for executable, _, spec in plan["executables"]:
        if executable in cached:
            machines[executable] = plan["jax_cache"]["machines"].get(json.decode(spec)["target"]["name"], [])
    committed = {
        executable: [",".join([str(position) for position in way]) or "none" for way in ways]
        for executable, ways in cached.items()
    }
    exports = {":" + export: None for executable, export, _ in plan["executables"] if executable in cached}
    aot_jax_cache(
        name = name + ".jax_cache",
        manifest = plan["path"],
        exports = exports.keys(),
        executables = [":" + executable for executable in cached],
        committed = committed,
        machines = machines,
        **common
    )

def declare_manifest(plan, jaxlibs, manifest, name, deps, data, function_deps, imports, isolation, common):
    """Declares the targets of a plan; the generated macro `aot_manifest` calls it.

    Args:
      plan: dict of path (the manifest's), package and folder below it (where it is), bundle (name, version), reproducible
        (whether that is tested), bundle_size (what it may have at most, or None), tolerances (of functions, beyond the
        baseline), jax_cache (executables, with the arguments that lie on a device, and machines by target), jaxlib (releases,
        by target), serves (releases that the bundle must have executables of), runs_on (newer releases that run executables as they are), exports [(name, function, spec)] and executables [(name, name of the export, spec)].
      jaxlibs: JAXLIBS of `@stagec_jaxlibs`.
      manifest: label of the manifest.
      name: as for aot_manifest, as are the others.
      deps: what all functions import.
      data: what all functions read.
      function_deps: what some functions import.
      imports: import roots.
      isolation: of compilations.
      common: attributes of all targets.
    """
    bundle, version = plan["bundle"]
    if name != bundle:
        fail('aot_manifest(name = "%s"): %s names its manifest "%s"; write aot_manifest(name = "%s", ...)' %
             (name, plan["path"], bundle, bundle))
    compiled = compiled_executables(plan, jaxlibs)
    if compiled.problems:
        fail("\n" + "\n".join(compiled.problems))
    crossing = compiled.crossing
    compiled = compiled.executables
    executables = [":" + one.name for one in compiled + crossing]
    functions = [function for _, function, _ in plan["exports"]]
    for function in function_deps:
        if function not in functions:
            fail('aot_manifest(name = "%s"): function_deps: %s has no function "%s", only %s' %
                 (name, plan["path"], function, ", ".join(functions)))
    looked = {export: _modules_of(spec) for export, function, spec in plan["exports"] if function not in function_deps}
    aot_imports(name = name + ".imports", functions = looked, deps = deps, data = data, imports = imports, **common)
    for export, function, spec in plan["exports"]:
        aot_export(
            name = export,
            spec = spec,
            deps = deps + function_deps.get(function, []),
            data = data,
            imports = imports,
            looked = ":" + name + ".imports" if export in looked else None,
            plugin = PLUGINS["cuda"] if "cuda" in json.decode(spec).get("plugins", []) else None,
            **common
        )
    for one in compiled:
        aot_executable(
            name = one.name,
            spec = one.spec,
            export = ":" + one.export,
            isolation = isolation,
            plugin = one.plugin,
            environment = one.environment,
            **dict(common, exec_properties = one.exec_properties or common.get("exec_properties") or {})
        )
    for writer in {one.writer.name: one.writer for one in crossing}.values():
        aot_results(
            name = "%s.results" % writer.name,
            executable = ":" + writer.name,
            environment = writer.environment,
            **dict(common, exec_properties = writer.exec_properties or common.get("exec_properties") or {})
        )
    for one in crossing:
        aot_crossing(
            name = one.name,
            executable = ":" + one.writer.name,
            results = ":%s.results" % one.writer.name,
            environment = one.environment,
            **dict(common, exec_properties = one.exec_properties or common.get("exec_properties") or {})
        )
    golden = [(export, spec) for export, _, spec in plan["exports"] if json.decode(spec)["golden"]]
    for export, spec in golden:
        weights = {":" + bound["file"]: bound["file"] for bound in json.decode(spec)["bind"].values()}
        file = json.decode(spec)["golden"]["inputs"]
        inputs = ":" + file if file else None
        aot_golden(name = export + ".golden", export = ":" + export, inputs = inputs, weights = weights, **common)
    specs = [spec for _, _, spec in plan["exports"]]
    aot_bundle(
        name = name,
        version = version,
        serves = plan["serves"],
        exports = [":" + export for export, _, _ in plan["exports"]],
        executables = executables,
        golden = [":" + export + ".golden" for export, _ in golden],
        weights = _weights_of(specs, external = False),
        external_weights = _weights_of(specs, external = True),
        **common
    )
    _declare_jax_cache(plan, name, common)
    tested = [export for export, _ in golden]
    _declare_golden_tests(name, [one for one in compiled + crossing if one.export in tested], common)
    optimized = [export for export, spec in golden if json.decode(spec)["golden"]["optimized"]]
    _declare_optimized_tests(name, [one for one in compiled if one.export in optimized and not one.suffix], common)
    _declare_baseline(plan, name, common)
    aot_latency(name = name + ".latency", bundle = ":" + name, **common)
    if plan["bundle_size"] != None:
        aot_size_test(name = name + ".size_test", bundle = ":" + name, most = str(plan["bundle_size"]), **common)
    aot_explanation(
        name = name + ".explain",
        bundle = name,
        version = version,
        exports = [":" + export for export, _, _ in plan["exports"]],
        executables = executables,
        **common
    )
    tuned = [(one.name, one.export) for one in compiled if json.decode(one.spec)["target"].get("autotuning") and not one.environment]
    if tuned:
        aot_autotuning(
            name = name + ".autotune",
            bundle = name,
            version = version,
            exports = {":" + export: None for _, export in tuned}.keys(),
            executables = [":" + executable for executable, _ in tuned],
            **common
        )
    aot_provenance(
        name = name + ".provenance",
        bundle = ":" + name,
        manifest = manifest,
        manifest_path = plan["path"],
        **common
    )
    for rule, suffix, more in (
        (aot_image, ".image", {}),
        (aot_image, ".container", {"container": True}),
        (aot_push, ".push", {}),
    ):
        # "manual": an image has a copy of the weights, which //... need not make.
        rule(
            name = name + suffix,
            bundle = ":" + name,
            jax_cache = ":" + name + ".jax_cache" if plan["jax_cache"]["executables"] else None,
            provenance = ":" + name + ".provenance",
            **dict(more, **_tagged(common, "manual"))
        )

    # Nobody reads it after each build of //...
    aot_report(name = name + ".report", provenance = ":" + name + ".provenance", bundle = ":" + name, **_tagged(common, "manual"))

    # Without a tag //... would fetch what serves, and what signs.
    aot_server(name = name + ".serve", bundle = ":" + name, **_tagged(common, "manual"))
    aot_signing(name = name + ".sign", provenance = ":" + name + ".provenance", **_tagged(common, "manual"))
    built = {"": []}  # exports are tested where no executable is of the build's own environment, too
    for one in compiled if plan["reproducible"] else []:
        built.setdefault(one.suffix, []).append(one)
    for suffix, of_it in built.items() if plan["reproducible"] else []:
        aot_reproducibility_test(
            name = name + ".reproducibility_test" + suffix,
            exports = [":" + export for export, _, _ in plan["exports"]],
            executables = [":" + one.name for one in of_it],
            environment = of_it[0].environment if suffix else None,
            **_tagged(common, "reproducibility")
        )
