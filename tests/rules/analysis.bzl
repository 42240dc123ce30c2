"""Tests of what rules do when they are analysed. Nothing is built.

    def _outputs_impl(ctx):
        return verdict(ctx, difference("outputs", names(ctx.attr.target.files), ["a.exported"]))

    outputs_test = analysis_test(_outputs_impl)
"""

ActionsInfo = provider(
    doc = "The actions of a target.",
    fields = {"actions": "list of Action."},
)

def _actions_impl(target, ctx):
    return [ActionsInfo(actions = target.actions)]

actions_of = aspect(implementation = _actions_impl, doc = "Hands a target's actions to a test.")

def analysis_test(implementation, attrs = {}):
    """A test rule with the attribute `target`; the name of what it makes ends in _test.

    Args:
      implementation: function of the context that returns `verdict(...)`.
      attrs: dict of further attributes.

    Returns:
      rule.
    """
    return rule(
        implementation = implementation,
        test = True,
        attrs = dict(target = attr.label(doc = "What is tested.", mandatory = True, aspects = [actions_of]), **attrs),
    )

def verdict(ctx, problems):
    """What the implementation of a test returns.

    Args:
      ctx: the test's context.
      problems: list of string; the test fails with these, and passes without any.

    Returns:
      list of provider.
    """
    script = ctx.actions.declare_file(ctx.label.name)
    lines = ["#!/bin/sh"] + ["echo '%s'" % problem.replace("'", "'\\''") for problem in problems]
    ctx.actions.write(script, "\n".join(lines + ["exit %d\n" % len(problems)]), is_executable = True)
    return [DefaultInfo(executable = script)]

def difference(what, got, wanted):
    """The problem with a value.

    Args:
      what: what the value is.
      got: what there is.
      wanted: what there should be.

    Returns:
      list of no or one string.
    """
    return [] if got == wanted else ["%s: got %r, wanted %r" % (what, got, wanted)]

def names(files):
    """Sorted names of files, without their folders.

    Args:
      files: depset of File.

    Returns:
      list of string.
    """
    return sorted([file.basename for file in files.to_list()])

def only_action(target, mnemonic):
    """The one action of a mnemonic.

    Args:
      target: the tested target.
      mnemonic: string.

    Returns:
      Action.
    """
    found = [action for action in target[ActionsInfo].actions if action.mnemonic == mnemonic]
    if len(found) != 1:
        fail("%s has %d actions %s" % (target.label, len(found), mnemonic))
    return found[0]

def _failure_test_impl(ctx):
    target = ctx.attr.target[0]  # A list: the attribute has a transition.
    problems = ["the analysis of %s did not fail" % target.label]
    if AnalysisFailureInfo in target:
        messages = [failure.message for failure in target[AnalysisFailureInfo].causes.to_list()]
        problems = [] if any([ctx.attr.message in message for message in messages]) else messages
    return [AnalysisTestResultInfo(success = not problems, message = "\n".join(problems))]

failure_test = rule(
    implementation = _failure_test_impl,
    doc = "Passes if the analysis of `target` fails with `message`.",
    analysis_test = True,
    attrs = {
        "target": attr.label(
            doc = "What is tested.",
            mandatory = True,
            cfg = analysis_test_transition(settings = {"//command_line_option:allow_analysis_failures": "True"}),
        ),
        "message": attr.string(doc = "Part of the message.", mandatory = True),
    },
)
