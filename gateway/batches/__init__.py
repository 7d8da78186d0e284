"""/v1/files and /v1/batches: lines of requests that are kept in SQLite and answered when there is time (docs/batches.md).

routes.py     what clients ask for
upload.py     a multipart body, as it comes in
database.py   files by their lines, batches and answers
lines.py      a line of an input file, and a line of an output file
runner.py     answers the lines of batches
"""
