"""`instep compare`: the same job in several settings, and a page that says who wins.

settings   which modes with how many workers, beside one process
measure    runs each from the same start for the same budget
report     what was measured, as the JSON that all that follows reads
verdict    words that follow from the report's figures
pictures   the report's figures, drawn
page       one HTML file that holds all of it
"""
