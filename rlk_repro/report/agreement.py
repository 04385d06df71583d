"""Show how the log-probs of training and rollout differ: a table that counts tokens by the size of the difference."""

from __future__ import annotations

from rlk_repro.base.units import format_count, format_number
from rlk_repro.report.blocks import Block, Section, Text, make_table
from rlk_repro.report.labels import number_or_dash
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import LADDER, AgreementResult
from rlk_repro.spec.values import BASELINE, ENABLED


def make_agreement(view: View) -> Section:
    found = {item.variant: item for item in view.analysis.agreement}
    columns = [_describe(found[variant]) if variant in found else {} for variant in (BASELINE, ENABLED)]
    first, second = columns
    rows = [(name, first.get(name, "–"), second.get(name, "–")) for name in first | second]
    places = [
        f"The log-probs of {item.variant} differ most at {place.place}, position {place.position}, token {place.token}."
        for item in found.values()
        if (place := item.largest) is not None
    ]
    numbers = (BASELINE, ENABLED)
    is_folded = view.is_comparison
    table = make_table("tokens", *numbers, rows=rows, numbers=numbers, note=" ".join(places), is_folded=is_folded)
    words = [f"{item.variant}: {item.reason}" for item in found.values() if item.reason]
    about = "The table counts the tokens of scored steps by the difference between log-probs of training and rollout."
    blocks: list[Block] = [Text(text="No token was compared.")]
    if any(item.num_tokens or item.num_not_finite for item in found.values()):
        blocks = [Text(text=about), table]
    if words:
        blocks.append(Text(text=f"Steps without a record: {'; '.join(words)}."))
    title = "Training against rollout, token by token"
    return Section(key="agreement", title=title, blocks=tuple(blocks))


def _describe(item: AgreementResult) -> dict[str, str]:
    rows = {"all tokens": format_count(item.num_tokens)}
    for bound, part in zip(LADDER, item.beyond, strict=False):
        share = f"{format_count(part)} ({format_number(100 * part / item.num_tokens)} %)" if part else "0"
        rows[f"differ by more than {bound:g}" if bound else "differ at all"] = share
    return rows | {
        "without a finite log-prob": format_count(item.num_not_finite),
        "largest difference": "0" if item.largest is None else format_number(item.largest.abs_difference),
        "mean difference": number_or_dash(item.mean_abs),
        "KL estimate k1": number_or_dash(item.k1),
        "KL estimate k3": number_or_dash(item.k3),
    }
