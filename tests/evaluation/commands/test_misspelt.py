"""Misspelt names on the command line: all of them are told, each with the nearest known name."""

import pytest

from kvpolicy.evaluation.cli import main

POLICIES = (
    "no policy is named 'fastvk' (did you mean fastv or fastkv?) or 'snapvk' (did you mean "
    "snapkv?); known: adakv, "
)


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("compare -p fastvk,snapvk", 1, POLICIES),
        ("estimate --config x --context 9 -p fastvk -p snapvk", 1, POLICIES),
        ("eval -t x --out no-such -p fastvk,snapvk", 1, POLICIES),
        ("generate --prompt-file - -p Snap-VK", 1, "'Snap-VK' (did you mean snapkv?); known: ada"),
        ("compare -p snapvk --scorer lst_query --selector kep_al", 1, "(did you mean snapkv?)"),
        ("compare -p snapvk --scorer lst_query --selector kep_al", 1, "(did you mean last_query?)"),
        ("compare -p snapvk --scorer lst_query --selector kep_al", 1, "(did you mean keep_all?)"),
        (
            "compare -p snapkv --set windw_size=3 --set kernl_size=3",
            1,
            "--set windw_size (did you mean window_size?) and --set kernl_size (did you mean "
            "kernel_size?) must name a parameter of a chosen policy",
        ),
        (
            "compare --scorer window_max_pool:windw_size=3,x=1",
            1,
            "--scorer window_max_pool takes no windw_size (did you mean window_size?) or x; it ",
        ),
        ("complare", 2, "Did you mean 'compare'"),
        ("compare --contxt 64", 2, "No such option: --contxt (did you mean --context?) (see"),
        (
            "compare --contxt=64 -p snapkv --sed 3 --x -- --more",
            2,
            "No such options: --contxt (did you mean --context?), --sed (did you mean --seed?), "
            "--x (see --help)",
        ),
    ],
)
def test_names_the_nearest(
    line: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
