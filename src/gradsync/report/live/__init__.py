"""The report as a page that follows a run: `gradsync watch`. Needs starlette and uvicorn, gradsync[report]."""
