"""A live page about runs, a sweep or a tournament, made from the files that they write anyway."""
