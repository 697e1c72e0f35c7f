from spider.cli import main

main()
