"""The samples of a stage on a terminal: a list, and beside it the sample that is chosen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import ClassVar, get_args

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import Worker

from parallel.errors import UserError
from pipeline.report.screens.sample import COLOURINGS, coloured_tokens, difference
from pipeline.report.view.sample_text import Regrade, grade_lines, route_table, sample_lines
from pipeline.run.run import Run
from pipeline.run.samples import Order, Query, StageSamples
from pipeline.text import visible
from stages.data.tokenizer import tokenizer_named
from stages.sampling.sample_files import Row

HEADINGS = ("step", "domain", "model", "reward", "tokens", "problem")
ORDERS: tuple[Order, ...] = get_args(Order)
KEY_DIGITS = 8  # of a problem's key, in the list
SECONDS = 2.0  # between two looks for new files
SHOWN = 2000  # samples in the list; a filter finds the others
# What an answer to a question changes in the query; an empty answer takes the filter away.
ASKED: dict[str, Callable[[str], dict[str, object]]] = {
    "search": lambda text: {"grep": re.compile(text) if text else None},
    "reward": lambda text: {"reward": _reward(text) if text else None},
    "step": lambda text: {"steps": tuple(int(step) for step in text.split())},
    "domain": lambda text: {"domain": text or None},
    "model": lambda text: {"model": text or None},
}
HINTS = {
    "search": "a regular expression, in prompts or responses",
    "reward": "SCORE or NAME=SCORE",
    "step": "a step, or several",
    "domain": "a domain",
    "model": "a model, in an evaluation",
}


def _reward(text: str) -> tuple[str, float]:
    name, _, score = text.rpartition("=")
    return name, float(score)


class SamplesScreen(Screen[None]):
    """The samples of a stage; keys order and filter them."""

    BINDINGS: ClassVar = [
        Binding("escape", "back", "back"),
        Binding("j,down", "move(1)", "next", show=False),
        Binding("k,up", "move(-1)", "previous", show=False),
        Binding("o", "order", "order"),
        Binding("slash", "ask('search')", "search"),
        Binding("r", "ask('reward')", "reward"),
        Binding("s", "ask('step')", "step"),
        Binding("f", "ask('domain')", "domain"),
        Binding("v", "ask('model')", "model"),
        Binding("p", "prompt", "same prompt"),
        Binding("m", "mark", "mark, to compare"),
        Binding("t", "tokens", "tokens"),
        Binding("e", "experts", "experts"),
        Binding("g", "grade", "grade again"),
    ]
    CSS = """
    #list { width: 2fr; } #shown { width: 3fr; padding: 0 1; } Input { display: none; }
    Input.asked { display: block; } #about { padding: 0 1; height: auto; }
    """

    def __init__(self, run: Run, stage: str, regrade: Regrade) -> None:
        """Find the samples; raise UserError where there are none. `regrade`: see `LookApp`."""
        super().__init__()
        self._run, self._stage, self._regrade = run, stage, regrade
        self._samples = StageSamples(run.stage(stage))
        self._query, self._asked = Query(), ""
        self._matches = self._samples.find(self._query)
        self._grading: Worker[None] | None = None
        self._marked: Row | None = None
        self._colouring = 0  # 0 for none, else one of COLOURINGS
        self._with_experts = False
        self._decode: Callable[[list[int]], str] | None = None

    def compose(self) -> ComposeResult:
        """Yield what is shown, the list, the sample, the question and the keys."""
        yield Static(id="about")
        with Horizontal():
            yield DataTable(id="list", cursor_type="row")
            with VerticalScroll(id="shown"):
                yield Static(id="sample")
        yield Input()
        yield Footer()

    def on_mount(self) -> None:
        """Show the first samples."""
        self._table.add_columns(*HEADINGS)
        self._table.focus()
        self._ask_for(self._query)
        self.set_interval(SECONDS, self._refresh)

    def _refresh(self) -> None:
        """Add what the stage has recorded since; where it took files away, show what is left."""
        newest = StageSamples(self._run.stage(self._stage))
        if newest.files and newest.files != self._samples.files:
            row, self._samples = self._table.cursor_row, newest
            self._ask_for(self._query)
            self._table.move_cursor(row=row)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#list", DataTable)

    def _ask_for(self, query: Query) -> None:
        """Show the samples of a query; one that cannot be answered leaves the list as it is."""
        try:
            matches = self._samples.find(query)
        except UserError as error:
            self._warn(error)
            return
        self._query, self._matches = query, matches
        self._table.clear()
        for row in matches[:SHOWN]:
            reward = "" if row["reward"] is None else f"{row['reward']:g}"
            about = [str(row["step"]), row["domain"], row["model"] or "", reward]
            key = (row["problem"] or "")[:KEY_DIGITS]
            cells = [*about, str(row["tokens"]), key]
            self._table.add_row(*(Text(visible(cell)) for cell in cells))
        self._show()

    def _show(self) -> None:
        """Show the chosen sample, its difference from the marked one, and its tokens."""
        about = (
            f"{self._run.name} {self._stage}: {len(self._matches)} samples · {self._asked_for()}"
        )
        self.query_one("#about", Static).update(Text(about))
        target = self.query_one("#sample", Static)
        if not self._matches:
            target.update(Text("No sample is like that."))
            return
        try:
            target.update(self._text_of(self._matches[self._table.cursor_row]))
        except UserError as error:  # a resumed stage took the file away, or no tokenizer is here
            target.update(Text(visible(str(error)), style="red"))

    def _text_of(self, match: Row) -> Text:
        [row] = self._samples.whole([match])
        text = Text("\n".join(sample_lines(row)))
        if self._marked is not None:
            text += Text("\n\n") + difference(self._marked, row)
        if self._colouring:
            text += Text("\n\n") + coloured_tokens(row, self._colouring, self._token_text)
        if self._with_experts:
            tokens = [*map(self._token_text, row["response_tokens"])]
            text += Text(f"\n\n{route_table(self._samples.routes(match), tokens)}")
        return text

    def _asked_for(self) -> str:
        query, words = self._query, [f"order {self._query.order}"]
        words += [f"step {' '.join(map(str, query.steps))}"] if query.steps else []
        words += [name for name in (query.domain, query.model) if name]
        words += [f"reward {query.reward[0]}={query.reward[1]:g}"] if query.reward else []
        words += [f"search {query.grep.pattern}"] if query.grep else []
        words += [f"problem {query.problem[:KEY_DIGITS]}"] if query.problem else []
        return visible(" · ".join(words))

    def _token_text(self, token: int) -> str:
        if self._decode is None:
            self._decode = tokenizer_named(self._run.settings.model.tokenizer).decode_prompt
        return self._decode([token])

    def on_data_table_row_highlighted(self) -> None:
        """Show the sample that the cursor came to."""
        if self._matches:
            self._show()

    def action_move(self, by: int) -> None:
        """Go to the next or the previous sample."""
        self._table.move_cursor(row=self._table.cursor_row + by)

    def action_order(self) -> None:
        """Change to the next order."""
        following = ORDERS[(ORDERS.index(self._query.order) + 1) % len(ORDERS)]
        self._ask_for(replace(self._query, order=following))

    def action_prompt(self) -> None:
        """Show all samples of the chosen one's prompt, and back."""
        match_problem = self._matches[self._table.cursor_row]["problem"] if self._matches else None
        problem = None if self._query.problem else match_problem
        self._ask_for(replace(self._query, problem=problem))

    def action_mark(self) -> None:
        """Compare what is shown from now on with the chosen sample; again: with none."""
        matches = self._matches[self._table.cursor_row : self._table.cursor_row + 1]
        try:
            rows = [] if self._marked is not None else self._samples.whole(matches)
        except UserError as error:
            self._warn(error)
            return
        self._marked = rows[0] if rows else None
        self._show()

    def action_tokens(self) -> None:
        """Colour the tokens by the next of what was recorded of them."""
        self._colouring = (self._colouring + 1) % (len(COLOURINGS) + 1)
        self._show()

    def action_experts(self) -> None:
        """Show the experts of each token, or no more."""
        self._with_experts = not self._with_experts
        self._show()

    def action_grade(self) -> None:
        """Show what the chosen sample earns by the rewards as they are now."""
        if self._matches and not self._is_grading:
            self.notify("grading it again; escape stops it", timeout=1)
            self._grading = self.run_worker(self._grade(self._matches[self._table.cursor_row]))

    @property
    def _is_grading(self) -> bool:
        return self._grading is not None and not self._grading.is_finished

    async def _grade(self, match: Row) -> None:
        stopped = Event()

        def check() -> None:
            if stopped.is_set():
                raise UserError("the grading was stopped")

        try:
            rows = self._samples.whole([match])
            # In a thread, since a reward may take minutes to load, or forever.
            [grade] = await asyncio.to_thread(self._regrade, self._stage, rows, check)
        except UserError as error:
            self._warn(error)
        else:
            self.notify("\n".join(grade_lines(grade)), title="graded again", markup=False)
        finally:
            stopped.set()

    def _warn(self, error: UserError) -> None:
        self.notify(visible(str(error)), severity="error", markup=False)

    def action_ask(self, name: str) -> None:
        """Ask for a filter."""
        self._asked, question = name, self.query_one(Input)
        question.placeholder = f"{name}: {HINTS[name]}; nothing for all"
        question.value = ""
        question.add_class("asked")
        question.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Filter by the answer."""
        self._close_question()
        try:
            changed = ASKED[self._asked](event.value.strip())
        except (ValueError, re.error) as error:
            self.notify(f"{HINTS[self._asked]}: {error}", severity="error", markup=False)
            return
        self._ask_for(replace(self._query, **changed))  # type: ignore[arg-type]

    def _close_question(self) -> None:
        self.query_one(Input).remove_class("asked")
        self._table.focus()

    def action_back(self) -> None:
        """Leave the question, the grading, the filters, or the screen, whichever is there first."""
        if self.query_one(Input).has_class("asked"):
            self._close_question()
        elif self._grading is not None and self._is_grading:
            self._grading.cancel()
            self.notify("the grading is stopped")
        elif self._query != Query():
            self._ask_for(Query())
        else:
            self.dismiss()
