# Starts the interpreter whose path comes first, or says that this machine has none: engines say it each in its own way.
[ -x "$1" ] && exec "$@"
echo >&2 "stagec: the machine that runs this action has no $1
  run it where there is one, or name the one that is there: stagec.python(interpreter = ...), docs/remote-packages.md"
exit 2
