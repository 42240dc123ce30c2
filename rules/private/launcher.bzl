"""The bash script that starts a Python process from its runfiles."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:python_environment.bzl", "INTERPRETER_FLAGS")

# Runfiles lie beside the program, or the program lies in another's, or RUNFILES_DIR says where they are.
_SCRIPT = """#!/usr/bin/env bash
set -euo pipefail

program="${{BASH_SOURCE[0]}}"
while :; do
  if [[ -d "$program.runfiles" ]]; then
    runfiles="$program.runfiles"
    break
  elif [[ "$program" == *.runfiles/* ]]; then
    runfiles="${{program%%.runfiles/*}}.runfiles"
    break
  elif [[ -L "$program" ]]; then
    target="$(readlink "$program")"
    [[ "$target" == /* ]] || target="$(dirname "$program")/$target"
    program="$target"
  elif [[ -d "${{RUNFILES_DIR:-}}" ]]; then
    runfiles="$RUNFILES_DIR"
    break
  else
    echo >&2 "$0: its runfiles are missing; build it with Bazel: bazel build "{label}
    exit 1
  fi
done
runfiles="$(cd "$runfiles" && pwd)"

# After a build that left its outputs in a cache, links of the runfiles lead nowhere.
missing="$(find "$runfiles" -xtype l -print -quit 2>/dev/null || true)"
if [[ -n "$missing" ]]; then
  echo >&2 {label}": ${{missing#"$runfiles"/}} is not on this machine: the build left it in the cache (--remote_download_minimal)"
  echo >&2 "  bazel run --remote_download_toplevel "{label}" downloads it; the line \"run --remote_download_toplevel\" in .bazelrc does so each time"
  exit 1
fi
workspace="$runfiles/"{workspace}

# packages IN_RUNFILES IN_EXECUTION_ROOT: where a folder of packages lies. Bazel before 8.3 gives a remote test the files of a
# directory where actions have them (bazelbuild/bazel#11495).
packages() {{
  local elsewhere="${{runfiles%/bazel-out/*}}/$2"
  if [[ ! -e "$runfiles/$1" && -e "$elsewhere" ]]; then echo "$elsewhere"; else echo "$runfiles/$1"; fi
}}

unset PYTHONHOME PYTHONSTARTUP
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONPATH={python_path}
{python}{environment}{body}"""

def shell_quote(text):
    """One word of bash.

    Args:
      text: string.

    Returns:
      string.
    """
    return "'" + text.replace("'", "'\\''") + "'"

def label_of(target):
    """A label as its user writes it: without the marks of the main repository, which are another's in each Bazel.

    Args:
      target: label.

    Returns:
      string.
    """
    text = str(target)
    return text.lstrip("@") if text.startswith("@//") or text.startswith("@@//") else text

def expand_locations(ctx, text, targets):
    """A word of bash with `$(location LABEL)` as the file's absolute path in runfiles.

    Args:
      ctx: the rule's context.
      text: string.
      targets: list of Target that the labels may name.

    Returns:
      string.
    """
    parts = text.split("$(location ")
    word = shell_quote(parts[0])
    for part in parts[1:]:
        word += "\"$workspace\"/" + shell_quote(ctx.expand_location("$(rootpath " + part, targets = targets))
    return word

# The words of bash that start the interpreter of a launcher's first environment.
PYTHON_COMMAND = " ".join(["\"$python\""] + INTERPRETER_FLAGS)

def _choice_of_python(environment, workspace_name):
    """Bash that sets $python. A test may run where actions do, with their interpreter."""
    if environment.emulated:
        return "python=%s\n" % _folder_word(environment.emulated.executable, workspace_name)
    lines = "python=%s\n" % shell_quote(environment.execution_interpreter)
    if environment.execution_interpreter != environment.interpreter:
        lines += "[[ -x \"$python\" ]] || python=%s\n" % shell_quote(environment.interpreter)
    return lines

def plugins_of(exports, executables):
    """What compiles for the platforms of executables, and what functions are traced with.

    Args:
      exports: list of AotExportInfo.
      executables: list of AotExecutableInfo.

    Returns:
      dict of platform to PythonEnvironmentInfo; those that need none are not in it.
    """
    plugins = {"cuda": one.plugin for one in exports if one.plugin}
    plugins.update({one.platform: one.plugin for one in executables if one.plugin})
    return plugins

def environment_files(environments):
    """The files of environments, for runfiles.

    Args:
      environments: list of PythonEnvironmentInfo.

    Returns:
      list of File.
    """
    files = [file for one in environments for file in (one.site_packages, one.fingerprint)]
    return files + [file for one in environments if one.emulated for file in one.emulated.files.to_list()]

def packages_word(environment, workspace_name):
    """A word of bash: the folder of an environment's packages.

    Args:
      environment: PythonEnvironmentInfo; a launcher's runfiles have it.
      workspace_name: name of the main repository.

    Returns:
      string.
    """
    return _folder_word(environment.site_packages, workspace_name)

def examined_rows(artifacts, environments):
    """The rows that making artifacts again takes: of libraries that stagec does not know.

    Args:
      artifacts: list of AotExportInfo and AotExecutableInfo.
      environments: list of PythonEnvironmentInfo that make them.

    Returns:
      list of File; empty if their manifest takes no such row.
    """
    if not [one for one in artifacts if one.examined == "here"]:
        return []
    return {row: None for one in environments for row in one.examined}.keys()

def _folder_word(file, workspace_name):
    """A word of bash: where a file or folder of the runfiles is."""
    path = file.short_path
    in_runfiles = path[len("../"):] if path.startswith("../") else workspace_name + "/" + path
    return "\"$(packages %s %s)\"" % (shell_quote(in_runfiles), shell_quote(file.path))

def plugin_words(plugins, workspace_name):
    """Words of bash that tell a command where plugins are, `--plugin PLATFORM=FOLDER` each.

    Args:
      plugins: as plugins_of returns them.
      workspace_name: name of the main repository.

    Returns:
      string.
    """
    return " ".join([
        "--plugin %s=%s" % (platform, packages_word(plugin, workspace_name))
        for platform, plugin in plugins.items()
    ])

def refused_elsewhere(ctx, what):
    """Bash that ends a program that writes beside its sources, where these are not the main repository's.

    `bazel run` names the folder of the main repository alone, and may have downloaded the other one.

    Args:
      ctx: the rule's context.
      what: string, what it writes.

    Returns:
      string; empty in the main repository.
    """
    if not ctx.label.workspace_name:
        return ""
    said = "%s: %s would be written beside sources of another repository: run it in the workspace of that one"
    return "echo >&2 %s\nexit 2\n" % shell_quote(said % (label_of(ctx.label), what))

def stagec_program(ctx, body, files, plugins = [], environment = None, extensions = [], examined = [], sources = []):
    """Makes a script that runs a command of the compiler the rule's executable. Its runfiles have all that it needs.

    Args:
      ctx: the rule's context; the rule asks for TOOLCHAIN_TYPE.
      body: bash that runs when `$runfiles` and `$workspace` are set; `{stagec}` in it starts the compiler.
      files: list of File that the command reads.
      plugins: list of PythonEnvironmentInfo that the compiler needs besides the toolchain's.
      environment: PythonEnvironmentInfo that it runs in instead of the toolchain's; or None.
      extensions: list of the extensions that it uses, as extension_of returns them.
      examined: list of File: the rows that it takes, as examined_rows returns them.
      sources: list of depset of File that it reads too.

    Returns:
      list of providers.
    """
    stagec = ctx.toolchains[TOOLCHAIN_TYPE].stagec
    environments = [environment or stagec.environment] + plugins
    path = stagec.entry.short_path
    entry = path[len("../"):] if path.startswith("../") else ctx.workspace_name + "/" + path
    start = "%s \"$runfiles\"/%s" % (PYTHON_COMMAND, shell_quote(entry))
    import_root = entry.rpartition("/")[0].rpartition("/")[0]
    body = "export STAGEC_PYTHON_ABI=%s\n" % shell_quote(environments[0].abi) + body.replace("{stagec}", start)
    roots = [import_root] + ["%s/%s" % (used.repository or ctx.workspace_name, used.folder) for used in extensions]
    script = write_launcher(ctx, roots, {}, body, environments, examined)
    return [DefaultInfo(
        executable = script,
        files = depset([script]),
        runfiles = ctx.runfiles(
            files = files + examined + environment_files(environments),
            transitive_files = depset(transitive = [stagec.sources] + [used.sources for used in extensions] + sources),
        ),
    )]

def write_launcher(ctx, import_roots, env, body, environments, examined = []):
    """Writes the script as the rule's executable.

    Args:
      ctx: the rule's context.
      import_roots: list of string, relative to the runfiles.
      env: dict of variables; `$(location LABEL)` in a value names a file of the attribute `data`.
      body: bash that runs when `$runfiles`, `$workspace` and PYTHONPATH are set.
      environments: list of PythonEnvironmentInfo whose packages are imported, the first one's first.
      examined: as stagec_program has it.

    Returns:
      File.
    """
    folders = [packages_word(environment, ctx.workspace_name) for environment in environments]
    folders += ["\"$(dirname %s)\"" % _folder_word(row, ctx.workspace_name) for row in examined]
    python_path = ":".join(folders + ["\"$runfiles\"/" + shell_quote(root) for root in import_roots])
    script = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(
        script,
        _SCRIPT.format(
            label = shell_quote(str(ctx.label)),
            workspace = shell_quote(ctx.workspace_name),
            python_path = python_path,
            python = _choice_of_python(environments[0], ctx.workspace_name),
            environment = "".join([
                "export %s=%s\n" % (name, expand_locations(ctx, value, ctx.attr.data))
                for name, value in env.items()
            ]),
            body = body,
        ),
        is_executable = True,
    )
    return script

ENVIRONMENT_ATTRS = {
    "environment": attr.label(
        doc = "The Python environment that it runs in: `@<name>//:environment` of a python_environment.",
        mandatory = True,
        providers = [PythonEnvironmentInfo],
    ),
    "env": attr.string_dict(
        doc = "Variables to set. `$(location LABEL)` is the absolute path of a file of `data`.",
    ),
}
