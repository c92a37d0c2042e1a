"""Words that the web site explains where a page uses them first."""

import re
from pathlib import Path

from docs import glossary

ROOT = Path(__file__).parents[1]


def test_the_first_use_of_a_term_is_explained_and_no_other():
    page = "<h2>Softmax</h2><p>The <code>softmax</code> and Softmax, then softmax; two ranks, a rank.</p>"
    said = glossary.explain(page)
    assert said.count("<abbr") == 2
    assert re.search(r'</code> and <abbr title="Exponentials [^"]+" tabindex="0">Softmax</abbr>, then softmax;', said)
    assert ">ranks</abbr>, a rank." in said


def test_a_longer_term_comes_before_a_word_of_it_and_words_inside_others_stay():
    said = glossary.explain("<p>A CUDA graph; frankly, tokenize.</p>")
    assert ">CUDA graph</abbr>" in said and said.count("<abbr") == 1


def test_what_leads_elsewhere_and_what_runs_is_left_alone():
    page = '<p><a href="x.html">rank</a></p><pre>rank</pre><table><th>rank</th></table><svg><text>rank</text></svg>'
    assert glossary.explain(page) == page


def test_terms_are_in_order_and_each_is_used_by_a_page():
    listed = [term for term, _ in glossary.ROW.findall(glossary.PAGE.read_text()) if term != "term"]
    assert listed == sorted(listed, key=str.lower) and len(listed) >= 30
    pages = [page for page in ROOT.glob("docs/*.md") if page != glossary.PAGE]
    text = "\n".join(page.read_text() for page in [*pages, *ROOT.glob("docs/reference/*.md")])
    unused = [term for term in listed if not re.search(rf"\b{re.escape(term)}(s|es)?\b", text, re.I)]
    assert unused == []
    assert {"softmax", "kernel", "pinned memory", "meta device", "graph break", "persistence", "climatology"} <= {
        *listed
    }
