"""From messages to tokens whose KV may be cached already."""
