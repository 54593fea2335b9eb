"""Reads answers aloud: Markdown into speakable sentences, a synthesizing process, a player."""
