"""Run `kvpolicy analyze`: where attention goes, and what dropping tokens costs by layer."""

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from kvpolicy.checks import check_rate
from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option

FILES = ("analyze.json", "analyze.png")


def analyze(
    *,
    prompt_file: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "File with one prompt as UTF-8 text, or - for standard input, instead of --task; "
            "repeatable.",
        ),
    ] = None,
    task: shared.Task = "needles",
    context: shared.Context = 1000,
    count: shared.Count = 4,
    seed: shared.Seed = 0,
    chat: shared.Chat = None,
    k: Annotated[
        int,
        option(
            "N",
            "Number of most attended tokens that are compared between layers.",
            *("--top-k", "-k"),
            min=1,
        ),
    ] = 64,
    window_size: Annotated[
        int, option("N", "Number of last tokens whose attention is shared.", min=1)
    ] = 8,
    tsp_rate: shared.TspRate = 0.2,
    model: shared.ModelName = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
    beyond_positions: shared.BeyondPositions = False,
    threads: shared.Threads = None,
    out: shared.Out = None,
) -> None:
    """Show which tokens each layer attends to, and how dropping the others changes the output."""
    from kvpolicy.evaluation.texts import read_prompt

    check_rate("tsp_rate", tsp_rate)
    threads = shared.check_before(out, FILES, threads, task)
    texts = [read_prompt(path) for path in prompt_file or ()]

    import torch

    from kvpolicy.evaluation.analysis import attention as measuring
    from kvpolicy.evaluation.analysis.distances import output_distances
    from kvpolicy.evaluation.analysis.prefill import check_prompts
    from kvpolicy.evaluation.commands import terminal
    from kvpolicy.evaluation.readable import check_positions, encode_prompt, positions_notes

    torch.set_num_threads(threads)
    loaded = terminal.load_shown(model, dtype=dtype, device=device)
    net = loaded.model
    inputs = [encode_prompt(loaded, text, chat=chat) for text in texts]
    inputs = inputs or shared.prompts_of(loaded, task, context, count, seed)
    prompts = check_prompts(net, inputs, window_size)
    lengths = [prompt.shape[1] for prompt in prompts]
    check_positions(loaded, max(lengths), beyond=beyond_positions, remedy="shorter prompts")
    measuring.check_ks([k], min(lengths))
    ks = [it for it in (k // 4, k // 2, k, 2 * k, 4 * k) if 1 <= it <= min(lengths)]
    attention: list[dict[int, torch.Tensor]] = []
    with terminal.progress_bar() as progress:
        last = net.config.get_text_config(decoder=True).num_hidden_layers - 1
        distances = output_distances(
            net, prompts, tsp_rate, max_layer=last, window_size=window_size, progress=progress
        )
        for prompt in prompts:
            progress("attention", len(attention), len(prompts))
            found = measuring.window_attention(net, prompt, window_size)
            attention.append({layer: found[layer] for layer in distances.layers})
    pairs = [measuring.topk_overlap(each, k).pairs for each in attention]
    shares = [list(measuring.attention_recall(each, ks).values()) for each in attention]
    pair_means, share_means = (torch.tensor(each).mean(dim=0).tolist() for each in (pairs, shares))
    overlap = measuring.Overlap(k, distances.layers, tuple(map(tuple, pair_means)))
    recall = dict(zip(ks, share_means, strict=True))
    chance = fmean(k / length for length in lengths)
    console = terminal.plain_console()
    heads = ["layer", "overlap", *(f"top {it:,}" for it in ks), "propagation", "restart"]
    console.print("  ".join(heads), style="bold")
    for index, (layer, row) in enumerate(zip(overlap.layers, overlap.pairs, strict=True)):
        cells = [str(layer), *(f"{100 * each:.1f}" for each in row[index + 1 :]), "-"][:2]
        cells += [f"{100 * held[index]:.1f}" for held in recall.values()]
        cells += [f"{fmean(way[index]):.4f}" for way in (distances.propagated, distances.restarted)]
        console.print("  ".join(cell.rjust(len(h)) for cell, h in zip(cells, heads, strict=True)))
    console.print(
        f"\noverlap: % of the {k:,} most attended tokens that a layer and the next have in common "
        f"({100 * chance:.1f} by chance). top: % of a layer's attention that its top tokens get. "
        f"Attention is that of the last {window_size} tokens, averaged over heads and "
        f"{shared.described(prompts)}. propagation, restart: ||h_full - h|| / ||h_full|| of the "
        f"last token's final hidden state, if {100 * tsp_rate:g}% of the tokens go on after the "
        "layer, or if the prefill restarts on as many.",
        style="dim",
        soft_wrap=False,
    )
    steps = [step for step in (1, 2, 4, 8, 16, 32) if step < len(overlap.pairs)]
    console.print(f"\noverlap % of layers apart{''.join(f'{step:>8}' for step in steps)}")
    for name, means in overlap.by_distance().items():
        cells = [f"{100 * means[s]:.1f}" if s < len(means) else "-" for s in steps]
        console.print(f"{name:>25}" + "".join(f"{cell:>8}" for cell in cells))
    for note in positions_notes(net, max(lengths)):
        console.print(note)
    if out is not None:
        import attrs

        from kvpolicy.evaluation.analysis.plots import plot_analysis

        data: dict[str, Any] = {
            **{"model": loaded.name, "dtype": loaded.dtype},
            **({"prompt_files": [*map(str, prompt_file)]} if prompt_file else {"task": task}),
            **{"seed": seed, "prompt_tokens": lengths, "window_size": window_size},
            "overlap": {**attrs.asdict(overlap), "chance": chance} | overlap.by_distance(),
            **{"recall": recall, "distances": attrs.asdict(distances)},
        }
        shown = plot_analysis(overlap, chance, recall, distances)
        shared.write(out, FILES, loaded, data, shown)
