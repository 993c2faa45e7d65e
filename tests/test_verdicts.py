"""Verdict codes, their pages and the generated document."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pptrace import verdicts
from pptrace.errors import InputError

ROOT = Path(__file__).parents[1]


def test_codes_are_well_formed_and_unique() -> None:
    """Every code is PPT and three digits, and appears once."""
    codes = [v.code for v in verdicts._ALL]
    assert len(codes) == len(set(codes)) == len(verdicts.VERDICTS)
    assert all(re.fullmatch(r"PPT\d{3}", code) for code in codes)
    assert codes == sorted(codes)


def test_every_constant_has_a_page() -> None:
    """A code the analysis can name always has something to explain."""
    tree = ast.parse((ROOT / "pptrace" / "verdicts.py").read_text("utf-8"))
    named = {
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith("PPT")
    }
    assert named == set(verdicts.VERDICTS)


@pytest.mark.parametrize("code", list(verdicts.VERDICTS))
def test_each_page_says_what_why_and_what_to_do(code: str) -> None:
    """Each page has a name, one sentence, an explanation and a remedy."""
    verdict = verdicts.VERDICTS[code]
    page = verdicts.explain(code.lower())
    assert page.startswith(f"{code}: {verdict.name}\n")
    assert verdict.meaning.endswith(".")
    assert verdict.meaning in page
    assert verdict.remedy
    assert all(line in page for line in verdict.remedy)
    assert max(map(len, page.splitlines())) <= 200


def test_unknown_code_is_one_clear_line() -> None:
    """An unknown code is refused with the known ones named."""
    with pytest.raises(InputError, match=r"PPT999: is not a verdict code.*PPT001"):
        verdicts.explain("PPT999")


def test_document_is_up_to_date() -> None:
    """docs/verdicts.md is what the module generates."""
    written = (ROOT / "docs" / "verdicts.md").read_text("utf-8")
    assert written == verdicts.to_markdown(), (
        "write it anew: python -c 'from pptrace import verdicts;"
        ' open("docs/verdicts.md", "w").write(verdicts.to_markdown())\''
    )
