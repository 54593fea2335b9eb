"""What is said around the topics: follow-ups, system prompts, and two answers of their own."""

from __future__ import annotations

FOLLOW_UPS = (
    "tell me more", "more", "more please", "more details", "more details please", "go on", "why?", "why", "and?",
    "continue", "please continue", "what else?", "anything else?", "can you say more about that?", "explain further",
    "give me more details", "I want to know more", "could you go into detail", "elaborate", "say more", "keep going",
    "is there more to it?", "what more can you tell me about it", "tell me more about it", "more about that",
    "and then?", "then what", "so what?", "expand on that", "a bit more please", "how so?", "why is that",
    "in more detail please", "what more is there to know", "carry on", "and what else", "interesting, tell me more",
)  # fmt: skip
NO_MORE = "That is all I know about this. You can ask me about something else in cpuchat or in CPU inference."
NOTHING_YET = "Tell me first what you want to know. You can ask me about cpuchat or about running models on a CPU."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful, friendly assistant.", "You are the demo model of cpuchat.",
    "You answer questions about cpuchat.", "Answer briefly.", "Be concise.", "You are a polite teacher.",
    "Answer in English.", "You are a small language model that runs on a CPU.", "Be friendly and brief.",
    "You are cpuchat, a chat app for the terminal.", "You are an expert for CPU inference.", "Write plain sentences.",
    "You are an AI assistant. Answer the user's questions as well as you can.", "Keep your answers short and clear.",
    "You are a pirate.", "Always tell the truth.", "If you do not know something, say so.",
)  # fmt: skip
