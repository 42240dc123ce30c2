"""The bash script that starts a Python process from its runfiles."""

load("//rules:providers.bzl", "PythonEnvironmentInfo")
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

unset PYTHONHOME PYTHONSTARTUP
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONPATH={python_path}
{environment}{body}"""

def shell_quote(text):
    """One word of bash.

    Args:
      text: string.

    Returns:
      string.
    """
    return "'" + text.replace("'", "'\\''") + "'"

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

def python_command(environment):
    """The words of bash that start the interpreter of an environment.

    Args:
      environment: PythonEnvironmentInfo.

    Returns:
      string.
    """
    return " ".join([shell_quote(word) for word in [environment.interpreter] + INTERPRETER_FLAGS])

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
    return [file for one in environments for file in (one.site_packages, one.fingerprint)]

def write_stagec_launcher(ctx, stagec, body, plugins):
    """Writes a script that runs a command of the compiler as the rule's executable.

    Args:
      ctx: the rule's context.
      stagec: StagecToolchainInfo.
      body: bash that runs when `$runfiles` and `$workspace` are set; `{stagec}` in it starts the compiler.
      plugins: list of PythonEnvironmentInfo that the compiler needs besides the toolchain's.

    Returns:
      File.
    """
    path = stagec.entry.short_path
    entry = path[len("../"):] if path.startswith("../") else ctx.workspace_name + "/" + path
    start = "%s \"$runfiles\"/%s" % (python_command(stagec.environment), shell_quote(entry))
    import_root = entry.rpartition("/")[0].rpartition("/")[0]
    return write_launcher(ctx, [import_root], {}, body.format(stagec = start), [stagec.environment] + plugins)

def write_launcher(ctx, import_roots, env, body, environments):
    """Writes the script as the rule's executable.

    Args:
      ctx: the rule's context.
      import_roots: list of string, relative to the runfiles.
      env: dict of variables; `$(location LABEL)` in a value names a file of the attribute `data`.
      body: bash that runs when `$runfiles`, `$workspace` and PYTHONPATH are set.
      environments: list of PythonEnvironmentInfo whose packages are imported, the first one's first.

    Returns:
      File.
    """
    paths = [environment.site_packages.short_path for environment in environments]
    folders = [path[len("../"):] if path.startswith("../") else ctx.workspace_name + "/" + path for path in paths]
    python_path = ":".join(["\"$runfiles\"/" + shell_quote(folder) for folder in folders + import_roots])
    script = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(
        script,
        _SCRIPT.format(
            label = shell_quote(str(ctx.label)),
            workspace = shell_quote(ctx.workspace_name),
            python_path = python_path,
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
