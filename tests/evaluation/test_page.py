"""report.html: what is in it, and how it works in a browser (headless Chromium, where there is one)."""

import csv
import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from eval_files import evals_of, problem, write_eval, write_lines
from slpo_jax.cli.commands import view
from slpo_jax.errors import UserError
from slpo_jax.evaluation import render, report, report_rows
from slpo_jax.evaluation.render import browse_problems
from slpo_jax.io import artifact
from slpo_jax.io.files import digest
from slpo_jax.io.workdir import Workdir

N = 30
EVIL = "</script><img src=x onerror=\"document.title='evil'\"> & <b>bold</b> {{js}}"
RIGHT = {  # of the greedy rollouts
    ("slpo", "alpha"): np.arange(N) % 2 == 0,
    ("cold_start", "alpha"): np.arange(N) % 3 == 0,
    ("slpo", "beta"): np.arange(N) < 25,
    ("cold_start", "beta"): np.arange(N) >= 5,
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Two sets and two rows, of which the first two problems' thoughts were watched on one set."""
    folder = tmp_path_factory.mktemp("page") / "run"
    rng = np.random.default_rng(0)
    for (row, name), right in RIGHT.items():
        facts = {"about": "A row <of> ours."}
        if row == "slpo":
            facts["settings"] = {"stage": "rl", "start": {"stage": "cold_start"}}
        write_eval(
            folder,
            row,
            name,
            right,
            rng.random((2, N, 8)) < 0.2,
            [1 + i % 4 for i in range(N)],
            **facts,
        )
        path = folder / "eval" / row / f"{name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[7] |= {
            "question": EVIL,
            "answer": "seven <",
            "correct": False,
            "cut": False,
        }
        write_lines(folder, row, name, lines)
    latents = [
        {"stop": 0.25, "likeliest": [["<eos>", 0.75], [" 7", 0.125]]},
        {"stop": 0.5, "likeliest": [["</b>", 1.0]]},
    ]
    seen = [
        {"text": "### 7", "latents": latents},
        {"text": "### 8", "latents": latents[:1]},
    ]
    alpha, beta = (
        Workdir(folder).set_files(name, "slpo") for name in ("alpha", "beta")
    )
    artifact.write(alpha.thoughts, digest(artifact.read(alpha.manifest).facts), seen)
    artifact.write(beta.thoughts, "another evaluation", seen)
    metrics = [
        {"step": s, "stage": "slpo", "reward": s / 10, "seconds": 0.5}
        for s in range(1, 9)
    ]
    metrics += [{"step": s, "stage": "cold_start", "loss": 1 / s} for s in range(1, 9)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics)
    )
    report.write_report(folder)
    return folder


@pytest.fixture
def dom(tmp_path):
    """(page, hash, script of its own) -> the document as it is then; nothing may be said on the console."""
    browser = shutil.which("chromium") or pytest.skip("no chromium on this machine")

    def opened(page, state="", script=""):
        copy = tmp_path / "page.html"
        copy.write_text(
            page.read_text().replace("</body>", f"<script>{script}</script></body>")
        )
        with tempfile.TemporaryDirectory() as profile:
            quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
            done = subprocess.run(
                [browser, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet),
                 f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom",
                 f"{copy.as_uri()}#{state}"],
                capture_output=True, text=True, timeout=120, check=True,
            )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        return done.stdout.partition('id="data"')[0]

    return opened


def _shown(dom):
    return [
        (name, int(i)) for name, i in re.findall(r'data-problem="(\w+) (\d+)"', dom)
    ]


def _text(dom, tag):
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", dom, re.DOTALL)
    return [unescape(re.sub("<[^>]*>", "", part)) for part in found]


@pytest.mark.slow
def test_the_page_says_what_the_report_says(workdir, dom):
    out = json.loads((workdir / "report.json").read_text())
    shown = dom(workdir / "report.html")
    first, table, *_ = _text(shown, "table")
    for row in out["headline"]["rows"]:
        assert "".join(row["cells"]) in first
    assert out["headline"]["title"] == "mean of 2 sets (60 problems)"
    assert out["headline"]["title"] in _text(shown, "p")
    assert (
        "SLPO"
        f"{100 * out['average']['slpo']['acc']:.1f} ± {100 * out['average']['slpo']['acc_se']:.1f}"
        in table
    )
    assert (
        len(re.findall("<figure>", shown)) == 2 + 2 + 2
    )  # Pass@k, stop times; SLPO's reward and seconds
    about = [unescape(text) for text in re.findall(r'data-about="([^"]*)"', shown)]
    assert "A row <of> ours." in about
    assert min(map(len, about)) > 10
    metrics = re.findall(r'<button data-about="([^"]+)" data-metric="([^"]+)"', shown)
    assert [name for _, name in metrics] == [
        "acc",
        "pass@1",
        "pass@8",
        "maj@8",
        "latent_steps",
        "sequential_steps",
        "cut",
    ]
    assert _shown(shown) == [("alpha", i) for i in range(20)]
    (question,) = [text for text in _text(shown, "p") if "onerror" in text]
    assert question == EVIL
    assert "✗ seven <" in _text(shown, "span")
    assert "<img" not in shown
    assert "evil" not in _text(shown, "title")


GREEDY = [(name, i) for name in ("alpha", "beta") for i in range(N)]


def _right(row, name, i):
    return bool(RIGHT[row, name][i]) and i != 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "fits"),
    [
        (
            "right=slpo&wrong=cold_start",
            lambda name, i: (
                _right("slpo", name, i) and not _right("cold_start", name, i)
            ),
        ),
        (
            "of=beta&wrong=slpo",
            lambda name, i: name == "beta" and not _right("slpo", name, i),
        ),
        ("text=BOLD", lambda _, i: i == 7),
        ("kept=1", lambda name, i: name == "alpha" and i < 2),
        ("page=3", lambda name, i: name == "beta" and i >= 10),
    ],
)
def test_an_address_finds_problems(workdir, dom, state, fits):
    wanted = [place for place in GREEDY if fits(*place)]
    shown = dom(workdir / "report.html", state)
    assert _shown(shown) == wanted[:20]
    assert (
        f"{60 if 'page' in state else len(wanted)} of {30 if 'of=' in state else 60} problems"
        in _text(shown, "p")
    )
    if "kept" in state:
        assert "1" + "0.25" + "<eos> 75 % 7 13 %" in _text(shown, "table")[-2].replace(
            " 0.25", "0.25"
        )


@pytest.mark.slow
def test_any_rollout_is_asked(workdir, dom):
    solved = evals_of(workdir)["slpo"]["alpha"].sample_correct.any(axis=(0, 2))
    shown = _shown(dom(workdir / "report.html", "of=alpha&by=any&wrong=slpo"))
    assert shown == [("alpha", i) for i in np.flatnonzero(~solved)]
    assert shown


@pytest.mark.slow
def test_it_is_used(workdir, dom):
    """A click sorts, again the other way; a choice filters, pages turn, the address tells; focus shows a definition."""
    script = """
      const first = () => document.querySelector("#results tbody td").textContent, seen = [first()];
      const sort = () => document.querySelector('[data-metric="acc"]').click();
      document.querySelector("[name=set]").value = "alpha";
      document.querySelector("[name=set]").dispatchEvent(new Event("change"));
      sort(); seen.push(first()); sort(); seen.push(first());
      document.querySelector('[data-turn="next"]').click();
      document.querySelector("[name=text]").value = "q";
      document.querySelector("#results td [data-about]").dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
      seen.push(document.getElementById("tip").textContent, document.getElementById("tip").hidden);
      document.documentElement.dataset.seen = JSON.stringify([...seen, location.hash]);
    """
    shown = dom(workdir / "report.html", "", script)
    seen = json.loads(unescape(re.search(r'data-seen="([^"]*)"', shown)[1]))
    assert seen == [
        "cold gate",
        "SLPO",
        "cold gate",
        "A row <of> ours.",
        False,
        "#set=alpha&sort=-acc&page=2",
    ]
    assert _shown(shown) == GREEDY[20:40]


@pytest.mark.slow
def test_little_is_shown_as_it_is(tmp_path, dom):
    """One row without samples or training; and two runs, whose problems are in pages of their own."""
    for run in ("a", "b"):
        write_eval(tmp_path / run, "imitate", "alpha", [1, 0, 1, 1], steps=[None] * 4)
        report.write_report(tmp_path / run)
    shown = dom(tmp_path / "a" / "report.html")
    assert "SFT75.0 ± 21.76.00 ± 0.00–" in _text(shown, "table")[0]
    assert _shown(shown) == [("alpha", i) for i in range(4)]
    assert "✂ truncated" in _text(shown, "span")
    assert "Training" not in _text(shown, "h2")
    write_eval(tmp_path / "b", "cold_start", "alpha", [1, 1, 0, 0])
    write_eval(tmp_path / "a", "cold_start", "alpha", [1, 1, 0, 1])
    report.compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    shown = dom(tmp_path / "all" / "report.html")
    assert "Each run's own report.html shows its problems." in _text(shown, "p")
    assert any(
        text.startswith("Means over 2 training runs: a, b.")
        for text in _text(shown, "p")
    )
    assert re.search(r'data-about="By run: \+0\.0, -25\.0\."', shown)


@pytest.mark.slow
def test_figures_and_tables_are_saved_as_svg_and_csv(workdir, dom):
    script = """
      const blobs = [], names = [];
      URL.createObjectURL = (blob) => { blobs.push(blob); return "blob:"; };
      HTMLAnchorElement.prototype.click = function () { names.push(this.download); };
      for (const button of document.querySelectorAll(".save")) button.click();
      Promise.all(blobs.map((blob) => blob.text())).then((texts) => {
        document.documentElement.dataset.saved = JSON.stringify(names.map((name, i) => [name, texts[i]]));
      });
      document.querySelector(".legend [data-about]").dispatchEvent(new FocusEvent("focusin", { bubbles: true }));
      document.documentElement.dataset.faint = document.querySelectorAll(".large .faint").length;
    """
    shown = dom(workdir / "report.html", "", script)
    saved = json.loads(unescape(re.search(r'data-saved="([^"]*)"', shown)[1]))
    kinds = [name.rpartition(".")[2] for name, _ in saved]
    assert kinds == ["csv"] * 2 + ["svg"] * 6
    (name, results), (_, differences), (_, svg), *_ = saved
    assert name == "Evaluation_report_run_results_mean_of_the_sets.csv"
    out = json.loads((workdir / "report.json").read_text())
    table = list(csv.reader(results.splitlines()))
    assert table[0][:4] == ["row", "Acc", "", "P@1"]
    acc, error = (
        f"{100 * out['average']['slpo'][key]:.1f}" for key in ("acc", "acc_se")
    )
    assert ["SLPO", acc, f"± {error}"] in [line[:3] for line in table]
    assert (
        len({len(line) for line in [*table, *csv.reader(differences.splitlines())]})
        <= 2
    )
    assert "," in differences.splitlines()[1].split('","')[2]
    drawn = ElementTree.fromstring(svg)
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in svg
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Pass@k (%), alpha", "SLPO", "cold gate", "k (rollouts)"} <= set(texts)
    legend = [group for group in drawn if group.get("transform")]
    assert [[node.tag.rpartition("}")[2] for node in group] for group in legend] == [
        ["path", "path", "text"]
    ] * 2
    assert 'data-faint="4"' in shown, (
        "the keyboard is on the first of two rows of four figures"
    )


def test_it_needs_no_network(workdir):
    page = (workdir / "report.html").read_text()
    page = re.sub(
        r"http://www\.w3\.org/[\w/]+", "", page
    )  # names of SVG and HTML, which nobody fetches
    assert not re.search(r'https?://|<link|<img|@import|url\(|fetch\(|\bsrc="', page)
    assert "default-src 'none'" in page


def test_a_page_that_would_be_too_large_has_the_first_problems(workdir, monkeypatch):
    evals = evals_of(workdir)
    whole = browse_problems(evals, {}, 10**9)
    assert {name: len(each["problems"]) for name, each in whole.items()} == {
        "alpha": N,
        "beta": N,
    }
    size = len(
        json.dumps([each["problems"] for each in whole.values()], ensure_ascii=False)
    )
    part = browse_problems(evals, {}, size // 2)
    kept = len(part["alpha"]["problems"])
    assert 10 < kept < 16
    assert part == {
        name: {**each, "problems": each["problems"][:kept]}
        for name, each in whole.items()
    }
    monkeypatch.setattr(render, "MOST_BYTES", 150_000)
    report.write_report(workdir)
    assert (workdir / "report.html").stat().st_size < 150_000
    monkeypatch.undo()
    report.write_report(workdir)


def test_answers_are_counted(tmp_path):
    """The outcomes of a problem, right, wrong and cut, and how often a row has them."""
    lines = [problem(0, True, [[1, 0], [0, 1]])]
    lines[0]["samples"][1] |= {"answer": "9", "cut": False}
    report_rows.write_row(tmp_path, report_rows.Row("slpo", "SLPO"))
    write_lines(tmp_path, "slpo", "alpha", lines)
    (found,) = browse_problems(evals_of(tmp_path), {}, 10**6)["alpha"]["problems"]
    assert found == [
        "q",
        "7",
        [["7", 1], ["9", 0], [None, 2]],
        {"slpo": [0, 3, 0, 2, 1, 1, 2, 1]},
        {},
    ]


def test_view_opens_the_page(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    write_eval(tmp_path / "run", "slpo", "alpha", [1, 0])
    page = tmp_path / "run" / "report.html"
    for asked in (tmp_path / "run", page):
        view([str(asked)])
        assert capsys.readouterr().out == f"{page}\n"
    assert opened == [page.as_uri()] * 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no records of an evaluation"):
        view([str(tmp_path / "empty")])
