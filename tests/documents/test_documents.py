"""Documents: text, PDF, Word files and HTML, from files, folders and standard input."""

import contextlib
import io
import os
import re
import sys
import threading
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from documents.pdf_files import pdf_of
from hf_hybrid_cache.documents import DocumentError, Documents, read_bytes, read_documents, require_documents

from common.soak import search_at_random

for _package in ("inscriptis", "lxml", "pypdf", "pypdfium2"):
    pytest.importorskip(_package, reason='needs pip install "hf_hybrid_cache[test]"')

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SIGNED = "It was signed by Ada."


ENTITIES = '<!DOCTYPE a [<!ENTITY e "eeeeeeee">]><w:styles>&e;</w:styles>'


def written(text: str, change: Callable[[Any], object]) -> bytes:
    """A PDF that pypdf's writer has changed."""
    from pypdf import PdfWriter

    writer, file = PdfWriter(io.BytesIO(pdf_of(text))), io.BytesIO()
    change(writer)
    writer.write(file)
    return file.getvalue()


def word_file(
    body: str, names: str = WORD, number: str = "", packed_as: int = zipfile.ZIP_STORED, **parts: str
) -> bytes:
    """A Word file with the XML of its body and of other parts, and a number after the names of parts."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packed_as) as written:
        for part, content in {"document": f"<w:document><w:body>{body}</w:body></w:document>", **parts}.items():
            content = re.sub(r"(?<=<)\w[^<> ]*", rf'\g<0> xmlns:w="{names}"', content, count=1)
            written.writestr(f"word/{part}{number}.xml", content)
    return file.getvalue()


def paragraph(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def docx_of(*paragraphs: str) -> bytes:
    return word_file("".join(map(paragraph, paragraphs)))


def html_of(text: str) -> bytes:
    return f"<!DOCTYPE html>\n<html><body><p>{text}</p></body></html>".encode()


WITH_A_FILE = written(SIGNED, lambda pdf: pdf.add_attachment("a.txt", b"inside"))
MADE: dict[str, Callable[[str], bytes]] = {"pdf": pdf_of, "docx": docx_of, "html": html_of, "txt": str.encode}


def read(*names: str | Path, remarks: list[str] | None = None) -> Documents:
    return read_documents([str(name) for name in names], ([] if remarks is None else remarks).append)


def text_of(name: str, content: bytes, remark: Callable[[str], None] = print) -> str:
    """Write a file and read it; remarks have its name without its folder."""
    with TemporaryDirectory() as folder:
        Path(folder, name).write_bytes(content)
        return read_documents([name], remark, Path(folder)).text


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of two texts, 20 words and 30."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.md").write_text(" ".join(f"w{index}" for index in range(50, 80)))
    (folder / "a.txt").write_text(" ".join(f"w{index}" for index in range(1, 21)))
    return folder


@pytest.mark.parametrize(
    ("name", "content", "text", "remark"),
    [
        # Whatever its name.
        *(("report.txt", make(SIGNED), SIGNED, None) for make in MADE.values()),
        ("a.pdf", pdf_of("One.", "", "3."), "One.\n\n3.", "1 of 3 pages have no text, as where they were scanned"),
        (
            "a.docx",
            word_file(f"{paragraph('before')}<w:altChunk/>{paragraph('after')}"),
            "before\nafter",
            "left out of it: documents inside it.",
        ),
        (
            "a.txt",
            "Über 5 €\r\nb".encode("cp1252"),
            "Über 5 €\nb",
            "not UTF-8, so read as cp1252 (Western European): if letters are wrong, save it in UTF-8",
        ),
        ("a.pdf", b"Signed.", "Signed.", "not a PDF, in spite of its name, so read as text"),
        ("a.txt", b"\x1b[31mred", "\x1b[31mred", None),
        ("a.txt", '<?xml version="1.0"?>\n<!doctype html><p>café'.encode("utf-16"), "café", None),
        ("a.pdf", WITH_A_FILE, SIGNED, "left out of it: files inside it, 1. Save them"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_a_text_is_whole_and_what_is_left_out_or_guessed_is_said(
    name: str, content: bytes, text: str, remark: str | None
):
    remarks: list[str] = []
    assert text_of(name, content, remarks.append) == text
    assert [said.startswith(f"{name}: {remark}") for said in remarks] == [True] * (remark is not None)


# What a page may say that it is in, and what a browser then decodes it as.
NAMED = {
    "utf-8": "utf-8", "utf-16": "utf-8", "iso-8859-1": "cp1252", "iso-8859-9": "cp1254", "x-sjis": "cp932",
    "windows-31j": "cp932", "euc-kr": "cp949", "koi8-r": "koi8-r",
}  # fmt: skip


@search_at_random(40)
@given(
    text=st.text(st.sampled_from("aé€şΩж①日本똠방"), min_size=1),
    named=st.sampled_from([*NAMED]),
    unnamed=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "iso-2022-jp"]),
)
def test_a_text_in_any_encoding_that_it_names_or_shows_is_read(text: str, named: str, unnamed: str):
    page = f'<html><!-- <meta charset="koi8-r"> --><meta charset={named}><p>{text}'
    for name, content, encoding in (("a.html", page, NAMED[named]), ("a.txt", f"{text}\r\n", unnamed)):
        with contextlib.suppress(UnicodeEncodeError):
            assert text_of(name, content.encode(encoding)).rstrip() == text


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_pdf_that_is_encrypted_without_a_password_is_read(algorithm: str):
    if algorithm != "RC4-128":
        pytest.importorskip("cryptography", reason="pypdf encrypts with it")
    open_one, secret = (written(SIGNED, lambda pdf: pdf.encrypt(key, algorithm=algorithm)) for key in ("", "secret"))  # noqa: B023
    assert text_of("a.pdf", open_one) == SIGNED
    with pytest.raises(DocumentError, match=r"is an encrypted PDF\. Make a copy that is not"):
        text_of("a.pdf", secret)


def test_a_pdf_when_filled_in_then_what_is_typed_follows_the_nearest_line():
    def at(top: int) -> str:
        return f"/Rect [90 {top - 12} 250 {top}]"

    notes = [
        f"/Subtype /Widget /FT /Tx /T (name) /V (Ada) {at(110)} /F 4",
        f"/Subtype /Widget /FT /Ch /Ff 131072 /T (city) /Opt [[(b) (Berlin)] [(p) (Paris)]] /V (p) {at(98)} /F 4",
        f"/Subtype /Widget /FT /Tx /T (hidden) /V (HIDDEN) {at(60)} /F 2",
        f"/Subtype /Widget /FT /Btn /T (box) /V /Yes /AP << /N << /Yes 99 0 R >> >> {at(60)} /F 4",  # drawn nowhere
        f"/Subtype /Widget /FT /Btn /T (other) /V /Yes /AS /On /AP << /N << /Yes 99 0 R >> >> {at(60)} /F 4",
        f"/Subtype /FreeText /Contents (HIDDEN) {at(60)} /F 2",
        f"/Subtype /FreeText /Contents (By Ada.) /DA (x) {at(60)} /F 4",  # which is drawn without its text
        f"/Subtype /FreeText /Contents (Paid.) {at(86)} /F 4",
    ]
    said = text_of("a.pdf", pdf_of("Name:\nCity:\nTotal: 7", notes=notes, form=""))
    assert said == "Name: Ada\nCity: Paris\nTotal: 7 Paid. By Ada."
    assert text_of("a.pdf", pdf_of("Name:", notes=[notes[-1].replace(at(86), at(110))])) == "Name: Paid."


@pytest.mark.parametrize(
    ("names", "number"),
    [(WORD, ""), ("http://purl.oclc.org/ooxml/wordprocessingml/main", "2")],
    ids=["usual", "strict and numbered"],
)
def test_a_word_file_has_all_that_it_shows_and_nothing_that_it_hides(names: str, number: str):
    def run(properties: str, text: str) -> str:
        return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"

    fields = """<w:ddList><w:result w:val="1"/><w:listEntry w:val="Red"/><w:listEntry w:val="Blue"/></w:ddList>
        <w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox><w:checkBox><w:default w:val="0"/></w:checkBox>"""
    body = f"""
        <w:p><w:pPr><w:tabs><w:tab w:val="left" w:pos="9"/></w:tabs></w:pPr>
            <w:r><w:t>A</w:t><w:tab/><w:t>tab</w:t></w:r>
            <w:ins><w:r><w:t xml:space="preserve"> inserted</w:t></w:r></w:ins>
            <w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>
        <w:sdt><w:sdtContent><w:p><w:r><w:t>a field</w:t></w:r></w:p></w:sdtContent></w:sdt>
        <w:tbl><w:tr><w:tc><w:p><w:r><w:t>c1</w:t></w:r></w:p><w:p><w:r><w:t>c2</w:t></w:r></w:p></w:tc>
            <w:tc><w:p><w:r><w:t>d</w:t></w:r></w:p></w:tc></w:tr></w:tbl>
        <w:p>{run("<w:vanish/>", "a")}{run('<w:rStyle w:val="Gone"/>', "b")}{run('<w:vanish w:val="0"/>', "last")}
            <w:r><w:fldChar><w:ffData>{fields}</w:ffData></w:fldChar></w:r></w:p>
        {paragraph("d", '<w:pStyle w:val="Gone"/><w:rPr><w:vanish/></w:rPr>')}
        <w:p><w:AlternateContent><w:Choice>{run("", "new")}</w:Choice><w:Fallback>{run("", "old")}</w:Fallback>
            </w:AlternateContent><w:AlternateContent><w:Choice><w:p/></w:Choice><w:Fallback>
            {run("", " box")}</w:Fallback></w:AlternateContent></w:p>
        <w:p><w:r><w:sym w:font="Symbol" w:char="F06D"/><w:t>g</w:t><w:sym w:font="Wingdings" w:char="F0FE"/>
            <w:sym w:font="MS Gothic" w:char="2612"/><w:sym w:font="Webdings" w:char="F0E0"/></w:r></w:p>"""
    notes = f"<w:footnotes><w:footnote>{paragraph('a note')}</w:footnote></w:footnotes>"
    styles = '<w:styles><w:style w:styleId="Gone"><w:rPr><w:vanish/></w:rPr></w:style></w:styles>'
    content = word_file(body, names, number, styles=styles, footnotes=notes)
    shown = "A\ttab inserted\na field\nc1 c2\td\nlastBlue☒☐\nnew box\nμg☑☒[Webdings 224]\na note"
    assert text_of("a.docx", content) == shown


def test_a_word_file_when_lists_are_numbered_then_has_the_shown_numbers():
    def level(index: int, shown: str, shape: str, more: str = "") -> str:
        return (
            f'<w:lvl w:ilvl="{index}"><w:start w:val="1"/><w:numFmt w:val="{shape}"/>{more}<w:lvlText w:val="{shown}"/>'
            "</w:lvl>"
        )

    def numbered(of_list: int, index: int, text: str = "x") -> str:
        return paragraph(text, f'<w:numPr><w:ilvl w:val="{index}"/><w:numId w:val="{of_list}"/></w:numPr>')

    levels = (
        level(0, "%1.", "upperRoman"),
        level(1, "%1.%2", "decimal", "<w:isLgl/>"),
        level(2, "(%3)", "lowerLetter"),
    )
    numbering = f"""<w:numbering>
        <w:abstractNum w:abstractNumId="0">{"".join(levels)}</w:abstractNum>
        <w:abstractNum w:abstractNumId="1">{level(0, "*", "bullet")}</w:abstractNum>
        <w:abstractNum w:abstractNumId="2"><w:numStyleLink w:val="Clauses"/></w:abstractNum>
        <w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>
        <w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>
        <w:num w:numId="3"><w:abstractNumId w:val="2"/>
            <w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/></w:lvlOverride></w:num>
        <w:num w:numId="4"><w:abstractNumId w:val="0"/>
            <w:lvlOverride w:ilvl="0"><w:startOverride w:val="{10**11}"/></w:lvlOverride></w:num></w:numbering>"""
    styles = """<w:styles>
        <w:style w:styleId="Clauses"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>
        <w:style w:styleId="Heading"><w:basedOn w:val="Clauses"/></w:style></w:styles>"""
    places = [(1, 0), (1, 0), (1, 1), (1, 2), (1, 2), (1, 1), (2, 0), (7, 0)]
    body = "".join(numbered(*place) for place in places) + paragraph("x", '<w:pStyle w:val="Heading"/>')
    body += numbered(3, 0) + numbered(4, 0)
    said = text_of("a.docx", word_file(body, numbering=numbering, styles=styles)).removesuffix(f"\n{10**11}. x")
    assert said.split("\n") == ["I. x", "II. x", "2.1 x", "(a) x", "(b) x", "2.2 x", "• x", "x", "III. x", "IX. x"]


def test_html_is_read_as_a_browser_shows_it():
    page = b"""<html><head><title>T &amp; U</title><style>p {}</style><script>var a = 1</script></head><body>
        <h1>A
        head</h1><p>It was <b>signed</b>   by
        <a href="x">Ada</a>.<p>Two<br>lines<!-- not shown --><ul><li>one<li>two</ul>
        <table><tr><th>a</th><td>b</td></tr><tr><td>c<td>d</table>
        <pre><code>\n<b>def</b> f():\n    return 1\n</code></pre>caf&eacute;"""
    shown = "T & U|A head|It was signed by Ada.|Two\nlines|  * one\n  * two\na\tb\nc\td|def f():\n    return 1|café"
    assert text_of("-", page).split("\n\n") == shown.split("|")
    page = b"""<html hidden><p hidden>1</p><div STYLE="color: red; Display : none"><p>2</div><dialog>3</dialog>
        <p style="visibility:hidden">4<p>Name: <input value=Ada> <input type=hidden value=5> <textarea>typed</textarea>
        <input type=checkbox checked><select><option>6<option selected>Paris</select><select><option>Red<option>7
        </select><ol start=3><li>one<?x ?> two</ol><div><template shadowrootmode=open>A shad&shy;ow</template></div>
        <template>8</template><p><![CDATA[a < <b>]]><script><![CDATA[9]]></script><!-- <![CDATA[9]]> -->."""
    shown = "Name: Ada typed ☒ Paris Red 3. one two A shadow a < <b>."
    assert " ".join(text_of("-", page).split()) == shown


def test_a_mail_is_read_after_who_wrote_it_to_whom_and_when():
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"], mail["X-Spam"] = (
        "Ada <ada@example.org>",
        "bob@example.org",
        "Über 5 €",
        "no",
    )
    shown = "From: Ada <ada@example.org>\nTo: bob@example.org\nSubject: Über 5 €\n\nIt is signé."
    for as_html in (False, True):
        text = "<p>It is <b>signé</b>." if as_html else "It is signé."
        mail.set_content(text, subtype="html" if as_html else "plain", charset="iso-8859-1")
        assert text_of("a.eml", mail.as_bytes()).rstrip() == shown
    mail.add_attachment(b"x", maintype="application", subtype="pdf", filename="a.pdf")
    remarks: list[str] = []
    assert text_of("a.txt", mail.as_bytes(), remarks.append) == shown
    assert remarks == ["a.txt: left out of it: files inside it, 1. Save them, and give them as documents, too"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", pdf_of("Please wait...", form="/XFA [(template) 5 0 R]"), "a.pdf is a PDF that only Adobe's"),
        ("a.pdf", pdf_of("", ""), "a.pdf is a PDF without any text, as a scanner makes it. Add text"),
        ("a.txt", pdf_of(SIGNED)[:-200], "a.txt is a PDF that is damaged (its end is missing)."),
        ("a.docx", docx_of(SIGNED)[:-100], "a.docx is a Word file that is damaged ("),
        ("a.htm", b'<meta charset="euc-jp"><p>caf\xe9', "a.htm says that it is in euc-jp, and is not: "),
        ("a.htm", b'<meta charset="x-foo"><p>a', "a.htm says that it is in x-foo, which Python does not know."),
        ("a.rtf", rb"{\rtf1\ansi It was signed.}", "a.rtf is RTF, which is not read. Save it as a PDF, or as a Word"),
        ("a.htm", b"<div>" * 3000 + b"a", "a.htm is HTML that is damaged (maximum recursion depth exceeded"),
        ("a.htm", b"<script>fill()</script>", "a.htm is HTML without any text, as where a script fills a page."),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a.doc is not UTF-8 text (byte 0 is 0xd0)."),
        ("a.zip", b"PK\x03\x04\0\0", "a.zip is a binary file, not text."),
        ("a.txt", b" ", "a.txt is empty."),
        ("a.docx", word_file("<w:p/>" * 500_000, packed_as=zipfile.ZIP_DEFLATED), "bytes unpack to 3,000,"),
        ("a.docx", word_file(paragraph(SIGNED), packed_as=zipfile.ZIP_BZIP2), "bytes unpack to "),
        ("a.docx", word_file("", styles=ENTITIES), "it defines entities, which Word does not"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[:40],
)
def test_a_document_that_cannot_be_read_is_one_line_with_its_name(name: str, content: bytes, message: str):
    with pytest.raises(DocumentError) as raised:
        text_of(name, content)
    assert str(raised.value).startswith(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@given(
    st.sampled_from([*MADE]), st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), max_size=4), st.floats(0.2, 1)
)
def test_whatever_is_damaged_is_read_or_refused_in_one_line(kind: str, changes: list[tuple[float, bytes]], kept: float):
    content = MADE[kind](SIGNED)
    for place, other in changes:
        start = int(place * len(content))
        content = content[:start] + other + content[start + len(other) :]
    try:
        said = text_of(f"a.{kind}", content[: int(kept * len(content))], lambda remark: None)
        assert said.strip()
        assert "\0" not in said
        assert said.encode()
    except DocumentError as error:
        said = str(error)
        assert said.splitlines() == [said]


@pytest.mark.parametrize(("kind", "library"), [("pdf", "pypdfium2"), ("html", "inscriptis")])
def test_without_the_package_the_extra_is_named(kind: str, library: str, monkeypatch: pytest.MonkeyPatch):
    content = MADE[kind](SIGNED)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DocumentError, match=rf'which {library} reads: pip install "hf_hybrid_cache\[documents\]"'):
        text_of("a", content)


# Several


def test_folders_are_read_in_order_once_and_what_is_left_out_is_named(texts: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DocumentError, match="can be read, as there are none, except hidden ones"):
        read(tmp_path / "empty")
    contents = {"sub/c.pdf": pdf_of(SIGNED), "Z.docx": docx_of(SIGNED), "scan.pdf": pdf_of(""), ".git/config": b"no"}
    for name, content in contents.items():
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_bytes(content)
    os.mkfifo(texts / "pipe")
    (texts / "loop").symlink_to(texts)
    (texts / "nowhere").symlink_to(texts / "missing")
    remarks: list[str] = []
    documents = read(texts / "b.md", texts, texts / "sub", remarks=remarks)
    assert [document.name.removeprefix(f"{texts}/") for document in documents.files] == [
        "b.md", "Z.docx", "a.txt", "sub/c.pdf",
    ]  # fmt: skip
    words, rest = (texts / "b.md").read_text(), f"Document: {texts}/Z.docx\n\n{SIGNED}\n\nDocument: "
    assert documents.text.startswith(f"Document: {texts}/b.md\n\n{words}\n\n{rest}")
    assert [why.removeprefix(f"{texts}/").split(",")[0] for why in documents.skipped] == [
        "b.md was read before.",
        "loop is a linked or protected folder: give it as a document",
        "nowhere is not a file",
        "pipe is not a file",
        "scan.pdf is a PDF without any text",
        "sub/c.pdf was read before.",
    ]
    assert {f"left out: {why}" for why in documents.skipped} < {*remarks}
    assert f"{texts}: documents read: 3; left out: 5" in remarks


@pytest.mark.parametrize("function", [require_documents, lambda names, folder: read_documents(names, print, folder)])
def test_a_name_of_nothing_that_can_be_read_is_refused(function: Callable[..., object], texts: Path):
    os.mkfifo(texts / "pipe")
    missing, endless = r"Cannot read .*: No such file", r"is a device, a pipe or a socket.* pass it on standard"
    reasons = dict.fromkeys(("missing", "-", "a\0b", "a" * 5000), missing) | {"/dev/zero": endless, "pipe": endless}
    for name, reason in {**reasons, " ": "' ' is not the name of a document"}.items():
        with pytest.raises(DocumentError, match=reason):
            function(["a.txt", name], texts)
    require_documents(["a.txt", "."], texts)


def test_what_has_no_end_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DocumentError, match=r"^/dev/zero has more than 256 MiB"):
        read_bytes(Path("/dev/zero"))
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(DocumentError, match="standard input has more than 256 MiB"):
            read("-")


def test_documents_with_more_text_than_any_context_are_refused(texts: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("formats", "reading"):
        monkeypatch.setattr(f"hf_hybrid_cache.documents.{module}.MOST_TEXT", 150)
    remarks: list[str] = []
    assert [file.name for file in read(texts, remarks=remarks).files] == [str(texts / "a.txt")]
    assert f"left out: With {texts}/b.md there are 189 characters of text, and at most 150 characters" in remarks[0]
    with pytest.raises(DocumentError, match=r"With .*b.md there are 189 characters"):
        read(texts / "a.txt", texts / "b.md")
    (texts / "long.pdf").write_bytes(pdf_of(*["x" * 40] * 9))
    with pytest.raises(DocumentError, match=r"With .*long\.pdf there are 166 characters"):  # pages beyond are not read
        read(texts / "long.pdf")


def test_time_of_a_word_file_grows_with_its_size():
    runs = "".join(f"<w:r><w:t>{number},</w:t></w:r>" for number in range(50_000))  # which was minutes, and is a second
    assert text_of("a.docx", word_file(f"<w:p>{runs}</w:p>")).count(",") == 50_000


# The type that a server tells of each page, and the content.
PAGES = {
    "/page": ("text/html", b"<title>A</title><p>Signed.</p>"),
    "/latin": ("text/plain; charset=iso-8859-1", "Über 5".encode("latin-1")),
    "/russian": ("text/html; charset=windows-1251", "<meta charset=utf-8>Да".encode("cp1251")),
    "/large.txt": ("text/plain", b"x" * 101),
}


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, content = PAGES.get(self.path, ("text/html", b"nothing here"))
        self.send_response(200 if self.path in PAGES else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_an_address_is_fetched_as_its_server_describes_it(texts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_hybrid_cache.documents.reading._MOST_BYTES", 100)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server, contextlib.ExitStack() as stack:
        threading.Thread(target=server.serve_forever).start()
        stack.callback(server.shutdown)
        at = f"http://127.0.0.1:{server.server_port}"
        names = [f"{at}/{name}" for name in ("page", "latin", "russian")]
        remarks: list[str] = []
        documents = read(*names, names[0], remarks=remarks)
        assert [each.name for each in documents.files] == names
        assert [each.text.strip() for each in documents.files] == ["A\n\nSigned.", "Über 5", "Да"]
        assert remarks == [f"left out: {names[0]} was read before."]
        assert read_documents(names[:1], print, texts).title == "page"
        with pytest.raises(DocumentError, match=f"^Cannot read {at}/none: HTTP Error 404: Not Found.$"):
            read(f"{at}/none")
        with pytest.raises(DocumentError, match=rf"^{at}/large\.txt has more than 0 MiB"):
            read(f"{at}/large.txt")
    with pytest.raises(DocumentError, match=f"^Cannot read {at}/page: .*refused"):
        read(f"{at}/page")


def test_standard_input_is_read_once_whatever_its_format(monkeypatch: pytest.MonkeyPatch):
    for made in (pdf_of, str.encode):
        remarks: list[str] = []
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(made(SIGNED))))
        assert read("-", "-", remarks=remarks).text == SIGNED
        assert remarks == ["left out: standard input was read before."]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DocumentError, match="Standard input is closed"):
        require_documents(["-"])
