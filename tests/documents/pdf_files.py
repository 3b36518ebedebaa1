"""PDF files, written by hand."""

from collections.abc import Sequence


def pdf_of(*pages: str, notes: Sequence[str] = (), form: str | None = None) -> bytes:
    """A PDF with a line of text on each page, or none; on the last one fields and notes, and the rest of its form."""
    numbers, first_note = range(4, 4 + 2 * len(pages), 2), 4 + 2 * len(pages)
    places = " ".join(f"{first_note + index} 0 R" for index in range(len(notes)))
    fonts = "/Font << /F1 3 0 R >>"
    catalog = "" if form is None else f"/AcroForm << /Fields [{places}] /DR << {fonts} >> {form} >>"
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{number} 0 R' for number in numbers)}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in zip(numbers, pages, strict=True):
        drawn = "BT /F1 12 Tf 12 TL 20 100 Td " + " T* ".join(f"({line}) Tj" for line in text.splitlines()) + " ET"
        of_page = f"/MediaBox [0 0 300 200] /Resources << {fonts} >> /Contents {number + 1} 0 R /Annots [{places}]"
        objects += [
            f"<< /Type /Page /Parent 2 0 R {of_page} >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn if text else ''}\nendstream",
        ]
    objects += [f"<< /Type /Annot {note if '/DA' in note else f'/DA (/F1 10 Tf 0 g) {note}'} >>" for note in notes]
    file, starts = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        starts.append(len(file))
        file += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{start:010} 00000 n \n" for start in starts)
    count = len(objects) + 1
    end = f"trailer\n<< /Size {count} /Root 1 0 R >>\nstartxref\n{len(file)}\n%%EOF\n"
    return f"{file}xref\n0 {count}\n0000000000 65535 f \n{table}{end}".encode()
