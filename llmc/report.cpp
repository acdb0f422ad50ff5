// report.cpp - the text of report_page.html, which is built into the program. It is compiled by itself, once
// for all builds of the trainer.
#include <string_view>

extern "C" const char llmc_report_page[], llmc_report_page_end[];
asm(".section .rodata\n"
    "llmc_report_page: .incbin \"llmc/report_page.html\"\n"
    "llmc_report_page_end: .byte 0\n"
    ".previous\n");

std::string_view report_page() { return {llmc_report_page, llmc_report_page_end}; }
