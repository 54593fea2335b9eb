"""What answers may call in a chat: files in a folder and MCP servers, and the calls that were approved."""

from __future__ import annotations

from pathlib import Path

from cpuchat.base.errors import CpuchatError
from cpuchat.session.conversation import Conversation
from cpuchat.tools.config import ToolServerConfig
from cpuchat.tools.folder import Folder
from cpuchat.tools.loop import Ask, FolderSource, Toolbox, ToolLoop, ToolSource
from cpuchat.tools.servers import ToolServer


class ChatTools:
    """Offers tools from the next answer on; `ask` approves calls."""

    def __init__(self, conversation: Conversation, ask: Ask) -> None:
        self.servers: dict[str, ToolServer] = {}
        """The MCP servers that are offered, by name."""
        self.box = Toolbox(())
        self._conversation = conversation
        self.loop = ToolLoop(self.box, ask)
        """The only one: the answer that runs may have it."""
        self._folder: Folder | None = None

    @property
    def folder(self) -> Path | None:
        """Return the folder in which the model may read files."""
        return self._folder.path if self._folder is not None else None

    def offer_folder(self, path: Path | None) -> None:
        """Let the model read files in a folder, none if None. Raises UsageError."""
        folder = Folder(path) if path is not None else None
        if self._folder is not None:
            self._folder.close()
        self._folder = folder
        self._offer()

    async def start_server(self, name: str, config: ToolServerConfig) -> ToolServer:
        """Start an MCP server and offer its tools. Raises CpuchatError."""
        server = self.servers[name] = ToolServer(name, config)
        self._offer()  # so that it is ended with the conversation
        try:
            await server.ready()
        except CpuchatError:
            if self.servers.get(name) is server:  # else it was ended, and started again
                del self.servers[name]
            raise
        finally:
            self._offer()
        return server

    async def end_server(self, name: str) -> None:
        server = self.servers.pop(name)
        self._offer()
        await server.close()

    def _offer(self) -> None:
        sources: list[ToolSource] = [FolderSource(self._folder)] if self._folder is not None else []
        self.box.sources = (*sources, *self.servers.values())
        self.box.collect()
        self._conversation.tools = self.loop if self.box.sources else None
