"""What compiles executables: releases of jaxlib, each for an architecture of CPUs.

One is the build's own. Another is the same release for aarch64, in Debian's Python; a workspace declares more.
"""

load("//rules/private:aarch64_python.bzl", "aarch64_python")
load("//rules/private:locks.bzl", "locked_releases")
load("//rules/private:platforms.bzl", "PLUGINS")
load("//rules/private:python_environment.bzl", "python_environment", "workspace_path")

_PLUGINS = [platform for platform, plugin in PLUGINS.items() if plugin]

# The attributes of python_environment that a declared jaxlib has too.
_ENVIRONMENT = {"interpreter": "", "interpreter_version": "", "packages": "", "trimmed": True}

_AARCH64 = "aarch64"

# Debian's, of compiler/aarch64.lock.
_EMULATED = {
    "architecture": _AARCH64,
    "emulated": Label("@stagec_aarch64_python//:interpreter"),
    "emulated_version": "3.11.2",
}

def declare_jaxlibs(lock, jaxlibs, python = None, groups = [], of_hub = False):
    """Declares the environments of other releases, and `@stagec_jaxlibs`, which manifests choose from.

    Args:
      lock: label of the lock of the build's own environment.
      jaxlibs: dict of names of repositories to dicts: `lock`, a label; and optionally `cuda_lock`, `rocm_lock`, `tpu_lock` and the
        attributes `interpreter`, `interpreter_version`, `packages` and `trimmed` of python_environment; `architecture`,
        "aarch64" where it compiles for that, and `exec_properties` of its actions then.
      python: label of the interpreter that installs packages; None: one on PATH.
      groups: of that lock, if it is a uv.lock.
      of_hub: whether the build's own environment has the packages of a hub: which release that is, only actions know.
    """
    aarch64_python(name = "stagec_aarch64_python")
    jaxlibs = dict(jaxlibs, stagec_aarch64 = {"lock": lock, "architecture": _AARCH64})
    known = ["architecture", "exec_properties", "lock"] + [plugin + "_lock" for plugin in _PLUGINS] + _ENVIRONMENT.keys()
    plugins = []
    for name, given in jaxlibs.items():
        unknown = [key for key in given if key not in known]
        if unknown or not given.get("lock"):
            fail('jaxlibs: "%s" %s; write for example {"lock": "//:%s.lock"}, with any of %s' % (
                name,
                'has an unknown key "%s"' % unknown[0] if unknown else "has no lock",
                name,
                ", ".join(known[1:]),
            ))
        attributes = {key: given.get(key, default) for key, default in _ENVIRONMENT.items()}
        if given.get("architecture"):
            if given["architecture"] != _AARCH64:
                fail('jaxlibs: "%s" has architecture = "%s"; write "%s", or leave it out for x86_64' %
                     (name, given["architecture"], _AARCH64))
            attributes.update(_EMULATED)
        python_environment(
            name = name,
            lock = given["lock"],
            groups = groups if given["lock"] == lock else [],
            python = python,
            **attributes
        )
        attributes.pop("packages")
        for plugin in _PLUGINS:
            if given.get(plugin + "_lock"):
                plugins.append("%s_%s" % (name, plugin))
                lock_of_plugin = given[plugin + "_lock"]
                python_environment(name = plugins[-1], jaxlib = name, lock = lock_of_plugin, python = python, **attributes)
    if of_hub:
        jaxlibs.pop("stagec_aarch64")
    stagec_jaxlibs(
        name = "stagec_jaxlibs",
        lock = None if of_hub else lock,
        names = jaxlibs.keys(),
        locks = [given["lock"] for given in jaxlibs.values()],
        settings = [json.encode({
            "architecture": given.get("architecture") or "",
            "exec_properties": given.get("exec_properties") or {},
        }) for given in jaxlibs.values()],
        plugins = plugins,
    )

_DEFS = '''"""The releases of jaxlib that compile executables; the first is the build's own."""

JAXLIBS = [struct(
    release = release,
    architecture = architecture,
    environment = Label(environment) if environment else None,
    plugins = {{platform: Label(plugin) for platform, plugin in plugins.items()}},
    exec_properties = exec_properties,
) for release, architecture, environment, plugins, exec_properties in {rows}]
'''

def _stagec_jaxlibs_impl(repository_ctx):
    own = locked_releases(repository_ctx, repository_ctx.attr.lock) if repository_ctx.attr.lock else []
    release = own[0] if len(own) == 1 else ""
    here = repository_ctx.execute(["uname", "-m"]).stdout.strip()
    rows = [(release, here, "", {}, {})]
    seen = {(release, here): "the build's own environment"} if release else {}
    for name, lock, text in zip(repository_ctx.attr.names, repository_ctx.attr.locks, repository_ctx.attr.settings):
        settings = json.decode(text)
        architecture = settings["architecture"] or here
        releases = [release] if name == "stagec_aarch64" else locked_releases(repository_ctx, lock)
        if len(releases) != 1:
            fail("%s pins %s; the lock of a declared jaxlib pins one: jaxlib==0.12.0, with its hashes" %
                 (workspace_path(lock), " and ".join(["jaxlib " + one for one in releases]) or "no jaxlib"))
        which = releases[0], architecture
        if which in seen and name == "stagec_aarch64":
            continue  # the workspace declares another, or this machine is one
        if which in seen:
            fail("%s and %s both have jaxlib %s; declare each release once" % (seen[which], name, releases[0]))
        seen[which] = name
        declared = {plugin: "%s_%s" % (name, plugin) for plugin in _PLUGINS}
        plugins = {plugin: "@%s//:environment" % of for plugin, of in declared.items() if of in repository_ctx.attr.plugins}
        rows.append((releases[0], architecture, "@%s//:environment" % name, plugins, settings["exec_properties"]))
    repository_ctx.file("defs.bzl", _DEFS.format(rows = repr(rows)), executable = False)
    repository_ctx.file("BUILD", 'exports_files(["defs.bzl"])\n', executable = False)

stagec_jaxlibs = repository_rule(
    implementation = _stagec_jaxlibs_impl,
    doc = "Reads which jaxlib each lock pins, and installs none: a manifest is planned without them. `defs.bzl` then has " +
          "JAXLIBS, a list of structs: release; architecture, of the CPUs that it makes code for; environment (a label, or None for the build's own); plugins (labels of " +
          "others than PLUGINS, by platform); exec_properties (dict, of the actions that compile).",
    attrs = {
        "lock": attr.label(doc = "The lock of the build's own environment, if it has one.", allow_single_file = True),
        "names": attr.string_list(doc = "The repositories of the others."),
        "locks": attr.label_list(doc = "The locks of these, in the same order.", allow_files = True),
        "settings": attr.string_list(doc = "`architecture`, \"\" for this machine's, and `exec_properties` of each, as JSON."),
        "plugins": attr.string_list(doc = "The repositories with plugins for these: their names with _cuda, _rocm or _tpu."),
    },
)

def _or(words):
    """A list of words for a person."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]

def _numbers(release):
    """A release as numbers, to compare."""
    return [int(part) for part in release.split(".") if part.isdigit()]

def compiled_executables(plan, jaxlibs):
    """What compiles each executable of a plan: a struct for each executable and release of jaxlib.

    Args:
      plan: dict, as `declare_manifest` gets it.
      jaxlibs: JAXLIBS of `@stagec_jaxlibs`.

    Returns:
      struct of executables, of crossing, and of problems (list of string, what is wrong with the releases). crossing is a
      list of structs like those of executables, without a spec: of those that a newer release runs; `writer` is a struct of
      what compiled it: release, name (of its target), environment, exec_properties. executables is a list of
      struct: name (of its target), export (name of that), spec (string), platform, environment (label, or None for the
      build's own), plugin (label or None), suffix (string, what distinguishes names of this environment), exec_properties
      (dict, of its action).
    """
    executables, crossing, problems = [], [], {}
    for name, export, spec in plan["executables"]:
        target = json.decode(spec)["target"]
        platform, own = target["platform"], jaxlibs[0].release
        releases = plan["jaxlib"].get(target.get("name"), [own])
        for key, asked in {"jax_cache": name in plan["jax_cache"]["executables"], "autotuning": target.get("autotuning")}.items():
            if asked and own not in releases:
                problems['%s: target "%s": %s is of the build\'s own jaxlib %s, which jaxlib = %s leaves out\n  %s' % (
                    plan["path"],
                    target["name"],
                    key,
                    own,
                    releases,
                    "add it, or leave %s out" % key,
                )] = None
        made = []
        for release in releases + [one for one in plan["runs_on"] if platform == "cpu" and one not in releases]:
            fitting = [one for one in jaxlibs if one.release == release]
            architecture = target.get("architecture", "x86_64") if platform == "cpu" else jaxlibs[0].architecture
            of_architecture = [one for one in fitting if one.architecture == architecture]
            key = "jaxlib" if release in releases else "runs_on"
            said = '%s: target "%s": %s = ["%s"]: ' % (plan["path"], target.get("name"), key, release)
            if not fitting:
                declared = _or({one.release or "that of the lock": None for one in jaxlibs}.keys())
                problems[said + "this workspace has jaxlib %s\n  declare a lock with jaxlib==%s (docs/fleet.md): %s" % (
                    declared,
                    release,
                    'stagec.jaxlib(name = "NAME", lock = "//:NAME.lock"), or stagec_repositories(jaxlibs = {"NAME": ' +
                    '{"lock": "//:NAME.lock"}})',
                )] = None
                continue
            if not of_architecture:
                problems[said + "this workspace has it for %s\n  declare one that makes code for %s (docs/aarch64.md): %s" % (
                    _or([one.architecture for one in fitting]),
                    architecture,
                    "architecture = \"%s\" beside its lock" % architecture,
                )] = None
                continue
            jaxlib = of_architecture[0]
            plugin = jaxlib.plugins.get(platform) if jaxlib.environment else PLUGINS[platform]
            if PLUGINS[platform] and not plugin:
                problems[said + "nothing says what compiles for %s with this jaxlib\n  write %s_lock beside its lock" %
                                (platform, platform)] = None
                continue
            suffix = ".jaxlib-" + release if jaxlib.environment and release != own else ""
            common = {
                "export": export,
                "platform": platform,
                "environment": jaxlib.environment,
                "suffix": suffix + ("." + architecture if architecture != jaxlibs[0].architecture else ""),
                "exec_properties": jaxlib.exec_properties,
            }
            if key == "runs_on":
                older = [one for one in made if _numbers(one.release) < _numbers(release)]
                if not older and len(made) < len(releases):
                    continue  # of which another problem tells
                if not older:
                    problems[said + "an older release never runs what a newer one made\n  add it to jaxlib"] = None
                    continue
                newest = max([_numbers(one.release) for one in older])
                writer = [one for one in older if _numbers(one.release) == newest][0]
                crossing.append(struct(name = name + ".jaxlib-" + release, writer = writer, plugin = None, **common))
                continue
            made.append(struct(name = name + suffix, release = release, **common))
            executables.append(struct(name = name + suffix, spec = spec, plugin = plugin, **common))
    return struct(executables = executables, crossing = crossing, problems = problems.keys())
