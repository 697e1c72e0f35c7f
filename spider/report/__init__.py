"""One page about one run: what was trained on what, how good it became, what it cost, how to do it again.

    stages       what the results folder holds of each stage, finished or not
    provenance   from the digest of a raw file to that of a checkpoint, and whether each link holds
    costs        time and energy of each rule's jobs
    figures      the charts of a run
    charts       inline SVG that keeps its text legible on a phone and follows a dark or light page
    page         the page: `render`, `page.html.j2`, `page.css`, `page.js`

The page is one file that asks for nothing: styles, script and figures are in it, and its content security
policy forbids the rest. So it can be mailed, archived or printed. Everything is read from what the jobs have
left; nothing is measured or hashed again.
"""
