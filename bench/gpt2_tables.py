"""What bench.gpt2 prints: the steps from naive to fused, and every row beside its peers."""

from rich.box import MARKDOWN
from rich.table import Table

from bench.gpt2_measure import DECODE, MODES
from bench.report import Row


def story_table(rows: list[Row], traffic: dict[str, Row]) -> Table:
    """(a), (b) and (c): what each step brings. Cells that were not measured stay empty."""
    table = Table("", "HBM MB of attention, a layer", "FLOP/byte", box=MARKDOWN)
    for title in ("prefill ms", "decode tokens/s", "prefill vs (a)"):
        table.add_column(title, justify="right")
    of = lambda op, mode: [  # noqa: E731
        row for row in rows
        if row["op"] == op and row["impl"].startswith(f"cupyflash-{mode}")
        and (op == "gpt2_prefill" or row["batch"] == DECODE[0][0])
    ]  # fmt: skip
    first = of("gpt2_prefill", "naive")
    for letter, mode in zip("abc", MODES):
        prefill, decode = of("gpt2_prefill", mode), of("gpt2_decode", mode)
        moved = traffic.get(mode)
        table.add_row(
            f"({letter}) {mode}",
            f"{moved['bytes'] / 1e6:.2f}" if moved else "",
            f"{moved['flop_per_byte']:.1f}" if moved else "",
            f"{prefill[0]['ms']:.2f}" if prefill else "",
            f"{max(x['tokens_per_s'] for x in decode):.0f}" if decode else "",
            f"{first[0]['ms'] / prefill[0]['ms']:.2f}" if first and prefill else "",
        )
    return table


def peers_table(rows: list[Row], weight_bytes: int, copy_gbps: float) -> Table:
    """All rows, how many times as fast as each peer.

    The roofline of a step is to read the weights once, at the bandwidth of a copy.
    """
    table = Table(box=MARKDOWN)
    for title in ("op", "batch x tokens", "impl"):
        table.add_column(title, no_wrap=True)
    for title in ("ms", "tokens/s", "vs compile", "vs eager", "roofline"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        ratios = []
        for peer in ("transformers-compile", "transformers-eager"):
            same = [
                x["ms"] for x in rows
                if x["impl"] == peer and (x["op"], x["batch"]) == (row["op"], row["batch"])
            ]  # fmt: skip
            ratios.append(f"{same[0] / row['ms']:.2f}" if same else "")
        share = 100 * weight_bytes / copy_gbps / 1e6 / row["ms"]
        table.add_row(
            row["op"].removeprefix("gpt2_"),
            f"{row['batch']} x {row['tokens']}",
            row["impl"],
            f"{row['ms']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            *ratios,
            f"{share:.0f} %" if row["op"] == "gpt2_decode" else "",
            style="bold" if row["impl"].startswith("cupyflash-fused") else "",
        )
    return table
