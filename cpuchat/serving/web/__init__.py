"""The app in browser tabs: a process for each, in a terminal that the browser draws."""
