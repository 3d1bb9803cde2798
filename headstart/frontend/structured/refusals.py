"""The error for a form that cannot be followed: what is wrong, and where."""

import json
from collections.abc import Callable
from typing import NamedTuple

from headstart.errors import RequestError
from headstart.frontend.structured.params import Form
from headstart.frontend.structured.places import Fault, find_fault
from headstart.frontend.structured.reasons import explain, is_too_deep
from headstart.validation import shorten

__all__ = ["Check", "refuse_form"]


class Check(NamedTuple):
    """A way to find out whether a form can be followed.

    refuse: says why a form cannot be followed, "" if it can. tries: how many parts of a form it
    may be asked about.
    """

    refuse: Callable[[Form], str]
    tries: int


def refuse_form(form: Form, reason: str, *checks: Check) -> RequestError:
    """The error for a form; the first of `checks` that refuses it is asked for the place."""
    name, pointer = form.kind, ""
    if form.kind in ("json", "structural_tag") and not is_too_deep(reason):
        check = next((one for one in checks if one.refuse(form)), None)
        if check is not None:
            name, reason, pointer = _find(form, reason, check)
    place = f", at {shorten(_printable(pointer))}" if pointer else ""
    return RequestError(
        f"structured_outputs.{name} cannot be followed: {explain(reason, kind=form.kind)}{place}"
    )


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)


def _find(form: Form, reason: str, check: Check) -> tuple[str, str, str]:
    """What is refused, a form's kind or its white space; why; and where, "" for nowhere."""
    if form.kind == "json":
        if form.whitespace and check.refuse(form._replace(text="{}")):
            return "whitespace_pattern", reason, ""
        return form.kind, *_search(form, reason, check)
    for at, tag in enumerate(json.loads(form.text)):
        schema = Form("json", json.dumps(tag[-2]), form.whitespace)
        if found := check.refuse(schema):
            why, pointer = _search(schema, found, check)
            return form.kind, why, f"#/structures/{at}/schema{pointer[1:]}"
    return form.kind, reason, ""


def _search(form: Form, reason: str, check: Check) -> Fault:
    return find_fault(
        form.text,
        reason,
        lambda text: check.refuse(form._replace(text=text)),
        tries=check.tries,
    )
