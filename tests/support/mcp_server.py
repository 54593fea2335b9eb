"""An MCP server as people write them, with the package `mcp`."""

from __future__ import annotations

import os

from mcp.server.mcpserver import Image, MCPServer
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)  # fmt: skip

server = MCPServer("good")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(first: int, second: int) -> int:
    """Add two numbers.

    They may be negative."""
    return first + second


@server.tool()
def environment() -> str:
    """Return the variables."""
    return " ".join(f"{name}={value}" for name, value in os.environ.items())


@server.tool()
def draw() -> Image:
    """Return a picture."""
    return Image(data=b"\x89PNG" * 300, format="png")


@server.tool(structured_output=False)
def find() -> list[ContentBlock]:
    """Return resources."""
    text = TextResourceContents(uri="notes://one", mime_type="text/markdown", text="# One")
    data = BlobResourceContents(uri="file:///a.bin", blob="AAAA" * 100)
    return [
        ResourceLink(
            name="q3", title="Third quarter", uri="reports://2026/q3\nnow", mime_type="application/pdf", size=1200,
            description="Revenue",
        ),
        ResourceLink(name="bare", uri="https://host/x"),
        EmbeddedResource(resource=text),
        EmbeddedResource(resource=data),
    ]  # fmt: skip


@server.tool()
def count(words: str) -> CallToolResult:
    """Return a summary, and what was found beside it."""
    found = {"words": words.split()}
    return CallToolResult(
        content=[TextContent(type="text", text=f"{len(words.split())} words")], structured_content=found
    )


@server.tool()
def refuse(words: bool) -> CallToolResult:
    """Fail with data, beside words or alone."""
    content: list[ContentBlock] = [TextContent(type="text", text="Not now.")] if words else []
    return CallToolResult(content=content, structured_content={"code": 7}, is_error=True)


@server.tool()
def halves(number: int) -> list[int]:
    """Return two halves."""
    return [number // 2, number - number // 2]


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("no such thing")


if __name__ == "__main__":
    server.run()
