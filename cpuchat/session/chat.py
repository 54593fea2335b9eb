"""One chat as its user drives it: a method for each action, and one stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Protocol

from cpuchat.backend.base import ended
from cpuchat.base.errors import ChatsError, CpuchatError
from cpuchat.chats.records import Deleted, StoredMessage, WhenFull, storable
from cpuchat.config.servers import Source, is_url, source
from cpuchat.protocol.messages import (
    AnyEvent,
    ContextTrimmed,
    Failed,
    GenerationFinished,
    LoadCancelled,
    ModelLoaded,
    Tool,
    ToolCall,
)
from cpuchat.session import events
from cpuchat.session.activity import Activity
from cpuchat.session.conversation import Conversation
from cpuchat.session.events import Outgoing, SessionEvent, Severity
from cpuchat.telemetry.units import plural, time_left
from cpuchat.tools.config import ToolServerConfig
from cpuchat.tools.loop import Choice, Toolbox, ToolLoop
from cpuchat.tools.servers import ToolServer

_NOT_ANSWERED = "Not answered. /compact summarizes the chat; then /regenerate answers your message."


class Background(Protocol):
    """Work for idle time. It ends before anything else begins."""

    @property
    def running(self) -> bool: ...

    async def stop(self) -> None: ...


class ChatSession:
    """Runs one load, answer, summary or measurement at a time, and queues messages meanwhile. Use from one event loop.
    An action that is not possible now says why (`Notice`) and does nothing. `listen` is called with each event as it
    happens; where it returns an awaitable, `AnswerBegun` waits for that."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.history = conversation.history
        self.source: Source | None = None
        """The model that was chosen, loaded or not."""
        self.loaded = False
        """The model was loaded once; the backend starts it again by itself."""
        self.failed_loads: dict[Source, Failed] = {}
        """Why models could not be loaded, until they are."""
        self.queue: list[Outgoing] = []
        """Messages to send, the next one first."""
        self.background: list[Background] = []
        self.tools = ToolLoop(Toolbox(()), self._ask_approval)
        """What answers may call. The answer that runs may have it."""
        self.tool_servers: dict[str, ToolServer] = {}
        self.no_model = "No model is loaded. Ctrl+O chooses one."
        self.next_begins_chat = False
        """The next message is for a new chat, which waits for the answer that is written."""
        self.listen: Callable[[SessionEvent], Awaitable[None] | None] = lambda event: None
        conversation.on_save_problem = lambda: self.listen(events.Changed("saving"))
        self._task: asyncio.Task[None] | None = None
        self._leave: Callable[[], None] | None = None  # stops a measurement
        self._before: Source | None = None  # to be loaded again where a load fails or is stopped
        self._is_awaited = False
        self._is_finishing = False
        self._is_uncalibrated = False  # the model was loaded, and passes not measured since
        self._calibrating: asyncio.Task[None] | None = None
        self._held = False  # the last answer failed: what is queued waits for the user
        self._approval: asyncio.Future[Choice] | None = None

    # State

    @property
    def activity(self) -> Activity:
        return self.conversation.activity.now

    @property
    def busy(self) -> bool:
        """Return whether a load, an answer, a summary or a measurement runs, or is about to."""
        return self.activity.runs

    @property
    def writing(self) -> bool:
        """Return whether an answer or a summary runs, or is about to."""
        return self.activity.answers or self.activity is Activity.SUMMARIZING

    @property
    def is_idle(self) -> bool:
        """Return whether not even background work is running."""
        is_calibrating = self._calibrating is not None and not self._calibrating.done()
        return not self.busy and not is_calibrating and not any(one.running for one in self.background)

    @property
    def loaded_source(self) -> Source | None:
        """Return the model in memory."""
        model = self.conversation.model
        return source(model.path) if model is not None else None

    @property
    def loading(self) -> Source | None:
        """Return the model that is being loaded."""
        return self.source if self.activity is Activity.LOADING else None

    @property
    def messages(self) -> list[StoredMessage]:
        """Return the messages of the open branch, with the answer being written."""
        return self.conversation.messages

    @property
    def chat_id(self) -> str | None:
        """Return the open chat; None for one without messages."""
        return self.conversation.chat.id if self.conversation.chat is not None else None

    @property
    def questions(self) -> list[str]:
        """Return the questions of the open branch."""
        return [message.content for message in self.messages if message.role == "user"]

    def question_index(self, message_id: int = 0) -> int:
        """Return the index of a question, or of the one that a message answers; 0: the last. -1 without any."""
        messages = self.messages
        ids = [message.id for message in messages]
        index = ids.index(message_id) if message_id in ids else len(ids) - 1
        return next((at for at in range(index, -1, -1) if messages[at].role == "user"), -1)

    def tell(self, text: str, severity: Severity = "information") -> None:
        self.listen(events.Notice(text, severity))

    def refuse(self, text: str, severity: Severity = "warning") -> None:
        """Say why an action is not possible."""
        self.listen(events.Notice(text, severity, refuses=True))

    def refuse_while_writing(self, action: str) -> bool:
        """Say that `action` has to wait, and return True, while an answer is being written."""
        if self.writing:
            self.refuse(f"You can {action} when the answer is done (Esc stops it).")
        return self.writing

    def refuse_while_busy(self, action: str) -> bool:
        """Say that `action` has to wait, and return True, while an answer or a load is running."""
        if self.busy and not self.refuse_while_writing(action):
            self.refuse(f"You can {action} when the model is loaded.")
        return self.busy

    def _refuse_without_model(self) -> bool:
        if not self.loaded:
            self.tell(self.no_model, "warning")
        return not self.loaded

    # What runs

    def _run(self, activity: Activity, work: Coroutine[Any, Any, Failed | None]) -> None:
        """Do `work` once what runs in the background has ended. It returns why the last question had no room."""
        self.conversation.activity.change(activity)

        async def run() -> None:
            self._held, full = False, None
            self.listen(events.Changed("state"))
            try:
                await self.stop_background()
                full = await work
            finally:
                self._task = None
                self.conversation.activity.change(Activity.NONE)
                self.listen(events.Changed("state"))
                self._go_on(full)

        def raise_error(task: asyncio.Task[None]) -> None:
            """Raise what nobody awaits, where the event loop reports the errors of callbacks."""
            if not self._is_awaited and not task.cancelled():
                task.result()

        self._task = asyncio.create_task(run(), name="chat-session")
        self._task.add_done_callback(raise_error)

    async def stop_background(self) -> None:
        """Stop the work for idle time; it starts again when the session is idle."""
        for one in self.background:
            await one.stop()
        if (task := self._calibrating) is not None:
            await ended(task)

    def _calibrate(self) -> None:
        """Measure what passes of a model that was loaded cost, in idle time: no answer waits for that."""

        async def run() -> None:
            await self.conversation.calibrate()
            self._is_uncalibrated = False
            self.listen(events.Changed("ceilings"))

        if self._is_uncalibrated and self.is_idle and self.conversation.speculation.drafters:
            self._calibrating = asyncio.create_task(run(), name="calibrate")

    async def stop(self) -> None:
        """Stop what runs, also what is about to begin. A stopped answer is kept as far as it is."""
        await self.conversation.stop()

    async def finish(self) -> None:
        """Stop what runs, and wait until its last text is shown and stored; nothing is loaded after it."""
        self._before, self._is_finishing = None, True
        await self.stop_background()
        if self._leave is not None:
            self._leave()
        task = self._task
        await self.stop()
        if task is not None:
            await asyncio.wait({task})
        self._is_finishing = False

    async def settled(self) -> None:
        """Wait until nothing runs and nothing is about to be sent. Raises what `listen` raised."""
        self._is_awaited = True
        try:
            while (task := self._task) is not None or (self.queue and self.loaded and not self._held):
                await (task if task is not None else asyncio.sleep(0))
        finally:
            self._is_awaited = False

    def measure(self, work: Coroutine[Any, Any, None], leave: Callable[[], None]) -> None:
        """Run a measurement, which may load the model again, in the place of an answer; `leave` stops it."""
        if self.refuse_while_busy("measure"):
            work.close()
            return

        async def run() -> None:
            try:
                await work
                await self.show_ceiling()
            finally:
                self._leave = None
                if self.source is not None:
                    self.loaded = self.conversation.model is not None
                self.listen(events.Changed("model"))

        self._leave = leave
        self._run(Activity.MEASURING, run())

    async def _stream(self, answer: AsyncGenerator[AnyEvent, None], *, stores: bool = False) -> AnyEvent | None:
        """Pass events on and return the last one; an error becomes `Failed`. `stores`: of an answer."""
        last: AnyEvent | None = None
        try:
            async with contextlib.aclosing(answer):
                async for event in answer:
                    if last is None and stores:
                        self.listen(events.Changed("question"))
                    last = event
                    self.listen(event)
        except CpuchatError as error:
            if stores and (last is None or isinstance(error, ChatsError)):  # not sent, or the chat was loaded again
                self.listen(events.MessagesChanged())
            last = Failed.of(error)
            self.listen(last)
        return last

    # Models

    def load(self, source: Source, again: bool = False) -> None:
        """Load a model; if that fails or is stopped, the one before is loaded again."""
        if self.refuse_while_busy("load another model"):
            return
        self._before = self.loaded_source if self.loaded_source != source else None
        self.source, self.loaded = source, False
        self.failed_loads.pop(source, None)

        async def run() -> None:
            last, before = await self._load_one(source, again), self._before
            if isinstance(last, Failed) and before is not None:
                await self._load_one(before, again=True)
            elif isinstance(last, LoadCancelled) and (before is not None or self.queue):
                # Later, as what is stopped begins nothing more; for a message that was sent since, too.
                asyncio.get_running_loop().call_soon(self.load, before or source, True)
            elif isinstance(last, LoadCancelled) and not self._is_finishing:
                self.tell("Load stopped. Your next message restarts it.")

        self._run(Activity.LOADING, run())

    def _loads_again(self, then: Callable[[], None] = lambda: None) -> bool:
        """Load the model again if the open chat has another context than it was loaded with, and do `then` after it,
        unless another chat is open by then."""
        if self.source is None or not self.conversation.wants_other_context:
            return False
        self.load(self.source)
        if (task := self._task) is not None:
            chat_id = self.chat_id
            task.add_done_callback(lambda _: then() if self.loaded and self.chat_id == chat_id else None)
        return True

    async def _load_one(self, source: Source, again: bool = False) -> AnyEvent | None:
        self.source, self.loaded = source, False
        self.listen(events.LoadBegun(source, again))
        last = await self._stream(self.conversation.load_model(source, calibrate="later"))
        self.loaded = self._is_uncalibrated = isinstance(last, ModelLoaded)
        if isinstance(last, Failed):
            self.failed_loads[source] = last
        self.listen(events.LoadEnded(source, last))
        return last

    async def show_ceiling(self) -> None:
        """Give the meter the ceilings of the loaded model by the passes that were measured on its cores."""
        if await self.conversation.refresh_reach():
            self.listen(events.Changed("ceilings"))

    def find_model(self, name: str) -> Source:
        """Return the model that the user names; reads files. Raises ModelNotFound, UsageError."""
        return source(name) if is_url(name) else self.conversation.any_library.resolve(name)

    # Messages

    def submit(self, message: Outgoing) -> None:
        """Send a message when its turn comes; the chosen model is loaded if it is not."""
        self.queue.append(message)
        if not self.loaded and not self.busy and self.source is not None:
            self.load(self.source)
        self._send_next()
        self.listen(events.Changed("queue"))

    def take_back(self) -> Outgoing | None:
        """Take the last message out of the queue; None if it is empty."""
        message = self.queue.pop() if self.queue else None
        if message is not None:
            self.listen(events.Changed("queue"))
        return message

    def take_back_all(self) -> list[Outgoing]:
        """Empty the queue and return what was in it."""
        messages, self.queue = self.queue, []
        if messages:
            self.listen(events.Changed("queue"))
        return messages

    def requeue(self, message: Outgoing) -> None:
        """Put a message that was returned before all others."""
        self.queue.insert(0, message)
        self.listen(events.Changed("queue"))

    def hold(self) -> None:
        """Send nothing after what runs."""
        self._held = True

    def _send_next(self) -> None:
        if not self.queue and self.loaded and not self.busy:
            self._calibrate()
        if not self.queue or not self.loaded or self.busy or self._loads_again():
            return
        message, *rest = self.queue
        self.queue = []
        if message.begins_chat:
            self.conversation.new_chat()
            self._show_opened()
        self.queue = rest
        self.listen(events.Changed("queue"))
        if message.editing is not None:
            self.listen(events.MessagesChanged(self.question_index(message.editing)))
            answer = self.conversation.edit(message.text, message.editing, message.attach)
        else:
            answer = self.conversation.send(message.text, attach=message.attach)
        self.listen(events.MessageSent(message))
        self._run(Activity.ANSWERING, self._answer(answer, message))

    def regenerate(self, message_id: int = 0) -> None:
        """Answer a question again, the last one if `message_id` is 0."""
        if self.refuse_while_busy("regenerate"):
            return
        if (question := self.question_index(message_id)) < 0:
            self.tell("Nothing to regenerate yet. Send a message first.")
        elif not self._refuse_without_model() and not self._loads_again(lambda: self.regenerate(message_id)):
            self.listen(events.MessagesChanged(question + 1))
            self._run(Activity.ANSWERING, self._answer(self.conversation.regenerate(message_id)))

    def continue_answer(self) -> None:
        """Let the model go on with the last answer."""
        if self.refuse_while_busy("continue the answer"):
            return
        if self.messages and self.messages[-1].role == "user":  # stopped before its first token
            self.regenerate()
        elif not self.history.is_unfinished:
            self.tell("Nothing to continue. Only an answer that was stopped or cut off can be.")
        elif not self._refuse_without_model() and not self._loads_again(self.continue_answer):
            self._run(Activity.ANSWERING, self._answer(self.conversation.continue_answer(), continues=True))

    async def answer_now(self) -> None:
        """End the reasoning of the running answer, so that the model answers now."""
        newest = self.messages[-1:]
        is_answering = any(message.role == "assistant" and message.content for message in newest)
        if is_answering or not self.writing:
            self.tell("The model is not reasoning.")
        elif not await self.conversation.end_reasoning():
            self.tell("The model is not reasoning yet, or not on this machine. Stop the answer instead.")

    async def _answer(
        self, answer: AsyncGenerator[AnyEvent, None], message: Outgoing | None = None, continues: bool = False
    ) -> Failed | None:
        """Pass an answer on; returns why its question had no room. A message that was not stored is returned."""
        before, conversation = self.history.question, self.conversation
        if inspect.isawaitable(begun := self.listen(events.AnswerBegun(message, continues))):
            await begun
        last = await self._stream(answer, stores=True)
        self.listen(events.AnswerEnded(last))
        self._held = isinstance(last, Failed)
        if message is not None:
            not_begun = message.editing is None and self.history.question is before
            if not_begun or [storable(message.text)] != self.questions[-1:]:
                self._held = True
                self.listen(events.MessageReturned(message))
        failed = last if isinstance(last, Failed) else None
        is_full = failed is not None and failed.code == "context_full" and (failed.alone or conversation.kept_all)
        if failed is not None and not is_full and not failed.code.startswith("worker_") and conversation.model is None:
            self.loaded = False
        self.listen(events.Changed("chats"))
        return failed if is_full else None

    def _go_on(self, failed: Failed | None) -> None:
        """Make room in a full context, or send the next message, unless the last answer failed."""
        if failed is None:
            if not self._held:
                asyncio.get_running_loop().call_soon(self._send_next)
        elif failed.alone:
            self.listen(events.QuestionTooLong())
        elif (chat := self.conversation.chat) is not None and len(self.messages) > 1:
            if self.makes_room(failed):
                self._make_room(chat.when_full)
            elif not chat.when_full:
                self.conversation.activity.change(Activity.AWAITING_ROOM)
                self.listen(events.WhenFullAsked(failed))

    # A full context

    def makes_room(self, failed: Failed) -> bool:
        """Return whether the last question failed because the context is full, and the chat knows what to do then."""
        chat, is_full = self.conversation.chat, failed.code == "context_full" and not failed.alone
        return is_full and self.conversation.kept_all and chat is not None and chat.when_full in ("compact", "drop")

    async def choose_when_full(self, choice: WhenFull) -> None:
        """Do what the full chat is to do from now on, and answer its last question; "": not now. Raises ChatsError."""
        if is_asked := self.activity is Activity.AWAITING_ROOM:
            self.conversation.activity.change(Activity.NONE)
        if choice and is_asked:
            await self.history.set_options(when_full=choice)
            self._make_room(choice)
        else:
            self.tell(_NOT_ANSWERED)

    def _make_room(self, choice: WhenFull) -> None:
        if self.busy or choice == "stop":
            self.tell(_NOT_ANSWERED)
        elif choice == "compact":
            self._run(Activity.SUMMARIZING, self._compact(again=True))
        else:
            self._run(Activity.ANSWERING, self._answer_last())

    def summarize(self) -> None:
        """Summarize the chat now."""
        if self.refuse_while_busy("summarize the chat") or self._refuse_without_model():
            return
        if not self.messages:
            self.tell("There is nothing to summarize yet.")
        elif not self._loads_again(self.summarize):
            self._run(Activity.SUMMARIZING, self._compact())

    async def _answer_last(self) -> Failed | None:
        self.listen(events.MessagesChanged())
        return await self._answer(self.conversation.regenerate())

    async def _compact(self, again: bool = False) -> Failed | None:
        """Pass a summary on; `again`: then answer the last question, and return as `_answer`."""
        before = len(self.messages)
        last: GenerationFinished | Failed | None = None
        trimmed: ContextTrimmed | None = None
        self.listen(events.AnswerBegun(summarizes=True))
        try:
            async with contextlib.aclosing(self.conversation.compact()) as summary:
                async for event in summary:
                    if isinstance(event, ContextTrimmed):
                        trimmed = event
                    elif isinstance(event, GenerationFinished | Failed):
                        last = event
                    else:
                        self.listen(event)
        except CpuchatError as error:
            last = Failed.of(error)
        is_kept = isinstance(last, GenerationFinished) and len(self.messages) > before
        self.listen(events.SummaryEnded(last, trimmed, is_kept))
        if is_kept and again:
            self.conversation.activity.change(Activity.ANSWERING)
            return await self._answer_last()
        if again:
            self.tell(_NOT_ANSWERED)
        return None

    # Tools

    async def _ask_approval(self, tool: Tool, call: ToolCall) -> Choice:
        self._approval = asyncio.get_running_loop().create_future()
        choice: Choice | None = None
        try:
            with self.conversation.activity.awaiting_approval():
                self.listen(events.ApprovalAsked(tool, call))
                choice = await self._approval
                return choice
        finally:
            self._approval = None
            self.listen(events.ApprovalEnded(choice))

    def approve(self, choice: Choice) -> None:
        """Answer to `ApprovalAsked`."""
        if self._approval is not None and not self._approval.done():
            self._approval.set_result(choice)

    async def start_server(self, name: str, config: ToolServerConfig) -> ToolServer:
        """Start an MCP server; the model may call its tools from the next answer on. Raises CpuchatError."""
        self.tell(f"Starting the MCP server {name}…")
        server = self.tool_servers[name] = ToolServer(name, config)
        self._offer_tools()  # so that it is ended with the conversation
        try:
            await server.ready()
            return server
        except CpuchatError:
            if self.tool_servers.get(name) is server:  # else it was ended, and started again
                del self.tool_servers[name]
            raise
        finally:
            self._offer_tools()

    async def end_server(self, name: str) -> None:
        """End an MCP server; the model has its tools no longer."""
        if name in self.tool_servers and not self.refuse_while_writing("change the tools"):
            server = self.tool_servers.pop(name)
            self._offer_tools()
            await server.close()
            self.tell_offered(f"MCP server {name} ended.")

    def _offer_tools(self) -> None:
        self.tools.toolbox.sources = tuple(self.tool_servers.values())
        self.tools.toolbox.collect()
        self.conversation.tools = self.tools if self.tool_servers else None
        self.listen(events.Changed("tools"))

    def tell_offered(self, text: str) -> None:
        """Tell that other tools are offered, which stand at the beginning of the prompt, and what that costs."""
        n_past = self.history.n_past
        self.tell(f"{text} The prompt changed; {n_past:,} tokens will be re-evaluated." if n_past else text)

    # Chats

    async def open(self, chat_id: str, message_id: int = 0) -> None:
        """Open a stored chat, on the branch of `message_id` unless 0. Raises ChatsError."""
        await self.conversation.open_chat(chat_id, message_id)
        self._show_opened(message_id)

    def new(self) -> None:
        """Start a new chat; while an answer is written, with the next message, and again: not. Raises ChatsError while
        an answer is unsaved."""
        if self.writing:
            self.next_begins_chat = not self.next_begins_chat
            self.listen(events.Changed("queue"))
        else:
            self.conversation.new_chat()
            self._show_opened()

    def _show_opened(self, message_id: int = 0) -> None:
        """Tell of the chat that is open now."""
        self.next_begins_chat = False
        if self.activity is Activity.AWAITING_ROOM:
            self.conversation.activity.change(Activity.NONE)
        self.listen(events.ChatOpened(message_id))
        self.listen(events.Changed("chats"))

    async def fork(self, message_id: int = 0) -> None:
        """Copy the open chat up to a message (0: all of it) into a new chat, and open that. Raises ChatsError."""
        if not self.messages:
            self.tell("This chat has no messages yet.")
        elif not self.refuse_while_writing("fork this chat"):
            await self.open((await self.history.fork(message_id)).id)
            self.tell("Forked. The copy is open now.")

    async def delete(self, chat_id: str) -> bool:
        """Delete a chat, until `undo`; a new one replaces an open one. False if it has to wait. Raises ChatsError."""
        is_open = chat_id == self.chat_id
        if is_open and self.refuse_while_writing("delete this chat"):
            return False
        await self.conversation.delete_chat(chat_id)
        if is_open:
            self._show_opened()
        self.listen(events.Changed("chats"))
        return True

    async def delete_message(self, message_id: int) -> bool:
        """Delete a message with all that follow from it, until `undo`; False if it has to wait. Raises ChatsError."""
        if self.refuse_while_writing("delete messages"):
            return False
        try:
            await self.conversation.delete_message(message_id)
        finally:  # it may have been changed in another window
            self._show_opened()
        return True

    async def undo(self) -> Deleted | None:
        """Put back what was deleted last, and return what it is; it is not opened. Raises ChatsError."""
        if self.refuse_while_writing("undo"):
            return None
        if (deleted := await self.history.undo_delete()) is None:
            self.tell("Nothing to undo.")
        self.listen(events.Changed("chats"))
        return deleted

    async def rename(self, chat_id: str, title: str) -> None:
        """Rename a chat. Raises ChatsError."""
        await self.history.rename(chat_id, title)
        self.listen(events.Changed("chats"))

    @property
    def branching(self) -> list[StoredMessage]:
        """Return the messages of the open branch that have others beside them."""
        return [one for one in self.messages if len(self.history.tree.siblings(one.id)) > 1]

    async def switch_branch(self, message_id: int, step: int) -> None:
        """Open the branch `step` places beside a message (0: the last one that has any). Raises ChatsError."""
        branching = [one.id for one in self.branching]
        message_id = message_id or next(reversed(branching), 0)
        if message_id not in branching:
            self.tell("No other answer here. Regenerate or edit makes one.")
            return
        siblings = self.history.tree.siblings(message_id)
        at = siblings.index(message_id) + step
        if self.chat_id is None or self.refuse_while_writing("show another answer"):
            return
        if not 0 <= at < len(siblings):
            which = "last" if step > 0 else "first"
            select = "Select a message marked ‹ › (Shift+Tab, then k or j) to switch versions."
            self.tell(f"This is the {which} of {len(siblings)}. {select}")
            return
        await self.conversation.open_chat(self.chat_id, siblings[at])
        self.listen(events.ChatOpened(siblings[at], is_branch=True))

    # What the chat is answered with

    @property
    def system_prompt(self) -> str:
        """Return the system prompt of the open chat, or of the next one."""
        chat = self.conversation.chat
        return chat.system_prompt if chat is not None else self.conversation.chosen.chat.system_prompt

    async def set_options(self, own: dict[str, Any], system_prompt: str) -> None:
        """Set the chat's own values and its system prompt, and say what that costs. Raises ChatsError."""
        conversation, before = self.conversation, self.system_prompt
        await conversation.options.set(own=own)
        if system_prompt != before:
            await conversation.options.set(system_prompt=system_prompt)
        self.listen(events.Changed("options"))
        said = "Set for this chat, from the next answer on."
        if self.system_prompt != before:
            self.listen(events.ChatOpened(is_branch=True))
            if n_past := self.history.n_past:
                seconds = conversation.meter.prefill_s(n_past)
                wait = f", ≈{time_left(seconds).removesuffix(' left')}" if seconds is not None and seconds >= 1 else ""
                said = f"{said} It reads the whole chat again: {plural(n_past, 'token')}{wait}."
        self.tell(said)
